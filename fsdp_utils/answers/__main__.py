"""Explain a traceback or log, from standard input or a file: python -m fsdp_utils explain < log."""

import json
import sys
from pathlib import Path

from fsdp_utils._commands import new_parser, run
from fsdp_utils.answers import explain

NOTHING = (
    "No message in this text is known. All that are, and questions: notebooks/answers.md. If FSDP raised it, "
    'please file it with the form "A message without an answer".'
)
PERHAPS = "Perhaps: programs without FSDP raise this message, too. The whole traceback may tell."


def main() -> int:
    """Print the answers; return 0, or 1 where nothing is known."""
    parser = new_parser("fsdp_utils explain", __doc__)
    parser.add_argument("--json", action="store_true", help="print the answers as JSON")
    parser.add_argument("file", nargs="?", help="the log; without it, standard input")
    options = parser.parse_args()
    try:
        read = sys.stdin.buffer.read() if options.file is None else Path(options.file).read_bytes()
    except OSError as error:
        parser.error(f"{options.file}: expected a file that can be read, found: {error.strerror}")
    text = read.decode("utf-8", "replace")
    answers = explain(text)
    if options.json:
        print(json.dumps([answer._asdict() for answer in answers], indent=2, ensure_ascii=False))
    elif not answers:
        print(*[f"{PERHAPS}\n{one}" for one in explain(text, perhaps=True)[:1]] or [NOTHING])
    else:
        print(answers[0])
        if all(answer.warns for answer in answers) and "Error: " in text:
            print("Note:    this is a warning, not the error in this text.")
        if answers[0].follows:
            print("Note:    another rank's error mostly comes before this one: look at its output, too.")
        if others := ", ".join(answer.id for answer in answers[1:]):
            print(f"Also in this text: {others}")
    return 0 if answers else 1


if __name__ == "__main__":
    sys.exit(run(main))
