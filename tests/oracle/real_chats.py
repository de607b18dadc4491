"""Twenty-five chats for a language model that writes real sentences. Knows nothing of who answers them."""

from __future__ import annotations

from typing import Any

Messages = list[dict[str, Any]]

QUESTIONS = (
    "What is the capital of France?", "Name three primary colours.", "How many legs does a spider have?",
    "What do bees make?", "Write one sentence about the sea.", "Translate 'good morning' into Spanish.",
    "What is two plus three?", "Why is the sky blue?", "Give me a synonym of 'happy'.", "What is the opposite of hot?",
    "Who wrote Romeo and Juliet?", "List the days of the weekend.", "What does a carpenter do?",
    "Which planet is the largest?", "Explain what a database is to a child.", "Write a short poem about rain.",
    "What is the boiling point of water in Celsius?", "Write a Python function that adds two numbers.",
    "What should I pack for a week in the mountains?",
)
LONG = " ".join(f"On day {day} the ship sailed {day * 7} miles and the crew saw {day + 2} birds."
                for day in range(1, 25))
OTHERS: tuple[Messages, ...] = (
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "What colour is grass?"}],
    [{"role": "system", "content": "You are a pirate."}, {"role": "user", "content": "How are you today?"}],
    [{"role": "user", "content": "My name is Ana."}, {"role": "assistant", "content": "Hello Ana!"},
     {"role": "user", "content": "What is my name?"}],
    [{"role": "user", "content": "Pick a number."}, {"role": "assistant", "content": "Seven."},
     {"role": "user", "content": "Double it."}],
    [{"role": "user", "content": f"{LONG} Summarise this in one sentence."}],
    [{"role": "user", "content": "Repeat: the cat sat on the mat, the cat sat on the mat, the cat sat on the mat."}],
)
CHATS: list[Messages] = [[{"role": "user", "content": text}] for text in QUESTIONS] + list(OTHERS)

ANIMAL = {
    "type": "object", "additionalProperties": False, "required": ["name", "legs", "can_fly"],
    "properties": {"name": {"type": "string", "maxLength": 20}, "legs": {"type": "integer", "minimum": 0, "maximum": 8},
                   "can_fly": {"type": "boolean"}},
}
ANIMALS = ("sparrow", "spider", "horse", "snake", "bee")
