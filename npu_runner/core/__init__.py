"""Which tokens run next and where their keys and values lie. No torch in here."""
