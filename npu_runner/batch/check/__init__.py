"""Checks of an input before its job."""
