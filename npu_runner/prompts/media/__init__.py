"""Images and videos: where they may come from, how they are read, which sizes they get. Knows no chat."""
