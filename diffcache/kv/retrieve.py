"""Retrievers: which slots a query reads; nothing is dropped."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from diffcache.kv.attend import Query
from diffcache.kv.layer import KVLayer
from diffcache.kv.settings import Settings
from diffcache.kv.view import View


class Retriever(Settings, ABC):
    """Choice of the slots that a query reads; a frozen dataclass of settings.

    Attributes:
        projects: True for one that makes keys by the model's projections, and so under its autocast.
    """

    projects: ClassVar[bool] = False

    @property
    def looks_across(self) -> bool:
        """Return whether a layer reads what another has found."""
        return False

    @abstractmethod
    def views(self, query: Query, layer: KVLayer, others: list[KVLayer]) -> list[View]:
        """Return what the queries attend to.

        Args:
            query: The queries; several at once (a prompt) read everything, unless they are
                `together`.
            layer: Layer that they read; the summary of its slots is kept in `layer.summary`.
            others: All layers, some of which share their choices.
        """
