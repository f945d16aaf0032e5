"""Tables that recipes learn of a model before they are used."""
