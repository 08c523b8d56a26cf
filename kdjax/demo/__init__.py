"""The embedded demo: a small teacher that writes stories, a smaller student, and stories.

The models' cards, `teacher.md` and `student.md`, are next to them and say how all of it was made.
Neither model was trained on `HELD_OUT`, and the student has not read `STORIES`.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TEACHER = FOLDER / "teacher.gguf"
TEACHER_SHAPE = FOLDER / "teacher"  # config.json of the teacher, to train it from scratch
STUDENT = FOLDER / "student.gguf"
STUDENT_SHAPE = FOLDER / "student"  # config.json and the tokenizer of both
STORIES = FOLDER / "stories.jsonl"  # what the demo trains on
HELD_OUT = FOLDER / "heldout.jsonl"
