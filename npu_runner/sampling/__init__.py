"""From logits to tokens: penalties, masks, draws and log probabilities. Knows no network."""
