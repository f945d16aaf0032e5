"""Retrievers choose the slots a query reads when nothing is dropped, one paper a file."""
