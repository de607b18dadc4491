"""The networks, written as if for one device."""
