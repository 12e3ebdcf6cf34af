"""How text from outside stands in a line of ours: on that line, without what terminals or CI systems would obey."""

# Blanks, and what joins the letters of some scripts and emoji: str.isprintable() is stricter.
_KEPT = frozenset("\xa0\u202f\u3000\u200c\u200d")

# GitHub and TeamCity obey these in the midst of a line, too.
_COMMANDS = ("##[", "##teamcity[")


def printable(text: str) -> str:
    """The text with control characters, ends of lines, and bytes that are not UTF-8 escaped."""
    for command in _COMMANDS:
        if command in text:
            text = text.replace(command, f"# {command[1:]}")
    if text.isprintable():
        return text
    return "".join(
        [
            letter
            if letter.isprintable() or letter in _KEPT
            else letter.encode("unicode_escape", "surrogatepass").decode()
            for letter in text
        ]
    )


class Printable:
    """Texts that stand in a line of ours as they are."""

    def __contains__(self, text: str) -> bool:
        return printable(text) == text


def printable_line(text: str) -> str:
    """The text on one line, printable, and indented by blanks. GitHub obeys what begins with ::, also after blanks."""
    line = printable(text.expandtabs())
    return line.replace("::", ": :", 1) if line.lstrip().startswith("::") else line


def printable_lines(text: str) -> list[str]:
    """The lines of a text, each as `printable_line` has it."""
    return [printable_line(line) for line in text.split("\n")]
