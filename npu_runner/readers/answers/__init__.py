"""The parsers of page readers' answers: text in, blocks and Markdown out. An answer is hostile until it is parsed."""
