"""Writes the page of the C reference from Doxygen's XML of gradwire.h."""
import os
import pathlib
import re
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree

SETTINGS = """@INCLUDE = docs/Doxyfile
GENERATE_HTML = NO
GENERATE_XML = YES
XML_PROGRAMLISTING = NO
WARNINGS = NO
WARN_AS_ERROR = NO
"""  # the test api_page reports warnings


def escaped(text):
    return re.sub(r"([*_|<>])", r"\\\1", text or "")


def inline(node, anchors):
    """Returns the content of a paragraph as Markdown. Names link to their entries."""
    out = escaped(node.text)
    for child in node:
        words = "".join(child.itertext())
        if child.tag == "ref":
            out += f"[`{words}`](#{anchors[child.get('refid')]})" if child.get("refid") in anchors else words
        elif child.tag == "computeroutput":
            out += f"`{words}`"
        elif child.tag == "bold":
            out += f"**{inline(child, anchors)}**"
        elif child.tag == "verbatim":
            out += f"\n\n```c\n{words.rstrip()}\n```\n\n"
        elif child.tag in ("itemizedlist", "parameterlist", "simplesect"):
            out += f"\n\n{block(child, anchors)}\n\n"
        else:
            out += inline(child, anchors)
        out += escaped(child.tail)
    return out


def block(node, anchors):
    """Returns a list, a table of parameters, or the description of the result."""
    if node.tag == "itemizedlist":
        return "\n".join("- " + indented(paragraphs(item, anchors)).lstrip() for item in node)
    if node.tag == "simplesect":
        return f"**Returns** {paragraphs(node, anchors)}"
    rows = [(item.findtext("parameternamelist/parametername"), item.find("parameterdescription"))
            for item in node]
    return "\n".join(f"- `{name}`: {indented(paragraphs(text, anchors)).lstrip()}" for name, text in rows)


def paragraphs(node, anchors):
    return "\n\n".join(part for child in node if (part := inline(child, anchors).strip()))


def indented(text):
    return re.sub(r"^(?=.)", "    ", text, flags=re.M)


def described(node, anchors):
    brief, more = node.find("briefdescription"), node.find("detaileddescription")
    # Doxygen cuts the first sentence off its paragraph.
    apart = len(more) == 0 or not (more[0].text or "").strip()
    return (paragraphs(brief, anchors) + ("\n\n" if apart else " ") + paragraphs(more, anchors)).strip()


def entries(members, anchors, declaration):
    """Returns a definition list of a struct's members or an enumeration's values."""
    return "\n\n".join(f"`{declaration(m)}`{{ #{anchors[m.get('id')]} }}\n:   "
                       + indented(described(m, anchors)).lstrip() for m in members)


def member_declaration(member):
    return f"{member.findtext('definition').split('::')[0].rpartition(' ')[0]} {member.findtext('name')}" + (
        member.findtext("argsstring") or "")


def declaration(member):
    kind, name = member.get("kind"), member.findtext("name")
    if kind == "define":
        return f"#define {name} {member.findtext('initializer')}"
    if kind == "typedef":
        return f"{member.findtext('definition')};"
    start = member.findtext("definition") + "("
    arguments = member.findtext("argsstring")[1:-1].split(", ")
    line = f"{start}{', '.join(arguments)});"
    return line if len(line) < 90 else start + (",\n" + " " * len(start)).join(arguments) + ");"


def entry(member, structs, anchors):
    """Returns the heading, the declaration and the description of a function, struct, type or constant."""
    kind, name = member.get("kind"), member.findtext("name")
    if kind == "enum":
        return entries(member.findall("enumvalue"), anchors,
                       lambda v: f"{v.findtext('name')} {v.findtext('initializer')}")
    if kind == "typedef" and name in structs:
        compound = structs[name]
        parts = [f"### struct `{name}` {{ #{name} }}", described(compound, anchors),
                 entries(compound.iter("memberdef"), anchors, member_declaration)]
        return "\n\n".join(parts)
    heading = f"### `{name}{'()' if kind == 'function' else ''}` {{ #{name} }}"
    return f"{heading}\n\n```c\n{declaration(member)}\n```\n\n{described(member, anchors)}"


def line_of(member):
    return int(member.find("location").get("line"))


def read(root):
    """Runs Doxygen. Returns its description of the header, its structs by name, and the anchor of each id."""
    with tempfile.TemporaryDirectory() as folder:
        settings = pathlib.Path(folder, "Doxyfile")
        settings.write_text(SETTINGS)
        subprocess.run(["doxygen", settings], cwd=root, check=True, stderr=subprocess.DEVNULL,
                       env={**os.environ, "GRADWIRE_BUILD": folder})
        found = [ElementTree.parse(path).getroot()
                 for path in pathlib.Path(folder, "docs", "xml").glob("*_*.xml")]
    compounds = [compound for file in found for compound in file.iter("compounddef")]
    structs = {c.findtext("compoundname"): c for c in compounds if c.get("kind") == "struct"}
    header = next(c for c in compounds if c.get("kind") == "file")
    anchors = {c.get("id"): name for name, c in structs.items()}
    for name, compound in structs.items():
        anchors.update((m.get("id"), f"{name}.{m.findtext('name')}") for m in compound.iter("memberdef"))
    for tag in ("memberdef", "enumvalue"):
        anchors.update((m.get("id"), m.findtext("name")) for m in header.iter(tag))
    return header, structs, anchors


def page(root):
    header, structs, anchors = read(root)
    sections = {}
    for part in header.findall("sectiondef"):
        title = part.findtext("header") or "Types and constants"
        members, text = sections.setdefault(title, ([], []))
        members += part.findall("memberdef")
        if part.find("description") is not None:
            text.append(paragraphs(part.find("description"), anchors))
    out = ["# C reference", described(header, anchors)]
    for title, (members, text) in sorted(sections.items(), key=lambda item: min(map(line_of, item[1][0]))):
        out += [f"## {title}", *text]
        out += [entry(member, structs, anchors) for member in sorted(members, key=line_of)]
    return "\n\n".join(out)
