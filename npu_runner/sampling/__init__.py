"""From logits to tokens: penalties, masks, sampling and log probabilities. Knows no network."""
