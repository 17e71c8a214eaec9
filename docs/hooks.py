"""What mkdocs calls while it builds the site: pages get endings from the sources, equations become MathML."""

import html
import logging
import re

import endings
from latex2mathml.converter import convert

log = logging.getLogger("mkdocs.hooks")  # a warning here ends a strict build

# What pymdownx.arithmatex leaves of $...$ and $$...$$.
EQUATION = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)


def on_page_markdown(markdown, page, **_):
    """Ends pages with what is made from the sources, such as a method's fields."""
    return f"{markdown.rstrip()}\n\n{endings.ending(page.file.src_uri)}"


def on_page_content(content, page, **_):
    """Turns a page's equations into MathML, which browsers show without a script."""

    def to_mathml(found: re.Match) -> str:
        is_block, latex = found[1] == "div", html.unescape(found[2]).strip()
        mathml = convert(latex, display="block" if is_block else "inline")
        if "\\" in mathml:
            log.warning("%s: latex2mathml does not know a command of the equation %s", page.file.src_uri, latex)
        return f'<div class="equation">{mathml}</div>' if is_block else mathml

    return EQUATION.sub(to_mathml, content)
