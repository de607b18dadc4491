"""Drawings of simple shapes with questions and answers: what the embedded models are trained and tried on."""
