"""Turns the comments of a header into comments that Doxygen reads. Doxygen calls it with the path of the header.

The comment at the top of the file becomes that of the file; any other comment on lines of its own becomes that of the
declaration below it, and lines indented by three spaces become code.
"""

import re
import sys

COMMENT = re.compile(r"( *)//(?: (.*))?$")
SPECIAL = re.compile(r"([\\@<>#%])")


def described(lines, indent, is_file):
    """Returns the lines of one comment as Doxygen's."""
    result = [f"{indent}/// \\file"] if is_file else []
    in_code = False
    for line in lines:
        is_code = line.startswith("  ") or (in_code and not line)
        if is_code != in_code:
            result.append(indent + "/// " + (r"\code" if is_code else r"\endcode"))
            in_code = is_code
        text = line if is_code else SPECIAL.sub(r"\\\1", line)
        result.append(f"{indent}/// {text}".rstrip())
    if in_code:
        result.append(f"{indent}/// \\endcode")
    return result


def filtered(text):
    result, comment, indent = [], [], ""
    is_file = True
    for line in [*text.split("\n"), ""]:
        found = COMMENT.match(line)
        if found and (not comment or found[1] == indent):
            indent = found[1]
            comment.append(found[2] or "")
            continue
        if comment:
            result += described(comment, indent, is_file)
            is_file = False
            comment = []
            if found:
                indent, comment = found[1], [found[2] or ""]
                continue
        result.append(line)
    return "\n".join(result)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as header:
        sys.stdout.write(filtered(header.read()))
