"""A reader can read each word of the site, on a phone and in both schemes.

The reader goes from release to release.
"""

from __future__ import annotations

import colorsys
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from conditions import for_releases

pytestmark = for_releases

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
TEXT, BORDER = 4.5, 3.0  # what WCAG 2.1 asks of contrasts

# Red, green, blue and alpha, each from 0 to 1.
Colour = tuple[float, float, float, float]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SITE)
    return importlib.import_module("look")


@pytest.fixture
def chromium(look: ModuleType) -> str:
    command: str | None = look.browser()
    if command is None:
        pytest.skip("wants Chromium")
    return command


# Colours, without a browser: those of the theme, and what style.css puts in their place

# Words, and what is behind them, by the names of the theme. A visited link looks as any
# other.
ON_THE_PAGE = {
    "text": "typeset-color",
    "links, and the current page in the menu": "typeset-a-color",
    "a link or button that the mouse is on": "accent-fg-color",
    "muted text, labels and names of columns": "default-fg-color--light",
    "the menu and table heads": "default-fg-color",
}
CODE_PARTS = [
    "number",
    "special",
    "function",
    "constant",
    "keyword",
    "string",
    "name",
    "operator",
    "punctuation",
]
CODE_PARTS += ["comment", "generic", "variable"]
ON_CODE = {
    "code": "code-fg-color",
    "links in code": "typeset-a-color",
    **{f"{part} in code": f"code-hl-{part}-color" for part in CODE_PARTS},
}
PAIRS = [
    *((what, words, "default-bg-color", TEXT) for what, words in ON_THE_PAGE.items()),
    *((what, words, "code-bg-color", TEXT) for what, words in ON_CODE.items()),
    (
        "code in a link that the mouse is on",
        "accent-fg-color",
        "accent-fg-color--transparent",
        TEXT,
    ),
    ("notes", "admonition-fg-color", "admonition-bg-color", TEXT),
    ("filled buttons", "primary-bg-color", "primary-fg-color", TEXT),
    ("buttons that the mouse is on", "accent-bg-color", "accent-fg-color", TEXT),
    ("the line below the current tab", "typeset-a-color", "default-bg-color", BORDER),
]


def style_sheets() -> str:
    """The rules of the theme and of ours, in the order in which a page loads them."""
    found = importlib.util.find_spec("zensical")
    if found is None or found.origin is None:
        pytest.skip("wants the theme, which Zensical has")
    folder = (
        Path(found.origin).parent / "templates" / "assets" / "stylesheets" / "modern"
    )
    sheets = [
        *folder.glob("main.*.css"),
        *folder.glob("palette.*.css"),
        SITE / "style.css",
    ]
    return "\n".join(sheet.read_text() for sheet in sheets)


def variables(css: str, scheme: str) -> dict[str, str]:
    """The variables of the body of a page in a scheme.

    Where two rules set one, the more special or later one wins.
    """
    attributes = {
        f"[data-md-color-scheme={scheme}]",
        "[data-md-color-primary=indigo]",
        "[data-md-color-accent=indigo]",
    }
    found: dict[str, tuple[int, str]] = {}
    for selectors, rules in re.findall(
        r"([^{};]+)\{([^{}]*--md-[^{}]*)\}",
        re.sub(r"/\*.*?\*/", "", css, flags=re.DOTALL),
    ):
        for selector in selectors.split(","):
            parts = set(re.findall(r"\[[^\]]*\]", selector.replace('"', "")))
            if not parts <= attributes or re.sub(
                r"\[[^\]]*\]", "", selector
            ).strip() not in ("", "body", ":root"):
                continue
            # What :root says is inherited, and what the body has itself comes before.
            weight = len(parts)
            for name, value in re.findall(r"--md-([\w-]+):\s*([^;]+)", rules):
                if name not in found or found[name][0] <= weight:
                    found[name] = (weight, value.strip())
    return {name: value for name, (_, value) in found.items()}


def colour_of(value: str, given: dict[str, str]) -> Colour:
    value = re.sub(r"var\(--md-([\w-]+)\)", lambda name: given[name[1]], value)
    if "var(" in value:
        return colour_of(value, given)
    if value.startswith("#"):
        digits = (
            value[1:] if len(value) > 5 else "".join(digit * 2 for digit in value[1:])
        )
        red, green, blue, alpha = (
            int((digits + "ff")[at : at + 2], 16) / 255 for at in (0, 2, 4, 6)
        )
        return red, green, blue, alpha
    hue, saturation, lightness, part = (
        float(number) for number in re.findall(r"[\d.]+", value)
    )
    return *colorsys.hls_to_rgb(hue / 360, lightness / 100, saturation / 100), part


def blend(top: Colour, below: Colour) -> Colour:
    red, green, blue = (top[at] * top[3] + below[at] * (1 - top[3]) for at in range(3))
    return red, green, blue, 1.0


def luminance(colour: Colour) -> float:
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in colour[:3]
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(words: Colour, behind: Colour, page: Colour) -> float:
    behind = blend(behind, page)
    dark, light = sorted((luminance(blend(words, behind)), luminance(behind)))
    return (light + 0.05) / (dark + 0.05)


def weak_pairs(css: str, scheme: str) -> list[str]:
    given = variables(css, scheme)
    page = colour_of(given["default-bg-color"], given)
    weak = []
    for what, words, behind, least in PAIRS:
        ratio = contrast(
            colour_of(given[words], given), colour_of(given[behind], given), page
        )
        if ratio < least:
            weak.append(f"{what}: {ratio:.2f}")
    return weak


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_words_stand_out_from_what_is_behind_them(scheme: str) -> None:
    assert weak_pairs(style_sheets(), scheme) == []


def test_a_visited_link_has_the_colour_of_links() -> None:
    assert ":visited" not in style_sheets()


# Words and widths, in a browser. `python docs/site/look.py` looks at all pages of the
# built site.


def page_with(body: str, folder: Path) -> Path:
    style = "[data-md-color-scheme=slate] { background: #222; color: #eee }"
    text = (
        f"<!doctype html><style>{style}</style><body "
        f"data-md-color-scheme='default'>{body}</body>"
    )
    (folder / "index.html").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (
            '<p style="color: #999">grey</p>',
            'default: html > body > p has 2.85 to 1: "grey"',
        ),
        (
            '<p style="color: #555">grey</p>',
            'slate: html > body > p has 2.13 to 1: "grey"',
        ),
        (
            '<p style="opacity: .3">faint</p>',
            'default: html > body > p has 2.11 to 1: "faint"',
        ),
        (
            '<p style="width: 700px">' + "wide " * 90 + "</p>",
            "at 400: the page is 708 pixels wide",
        ),
        (
            (
                '<p style="width: 90px; overflow: hidden; white-space: nowrap">words '
                "that are cut here</p>"
            ),
            'at 1280: html > body > p is cut: "words that are cut here"',
        ),
    ],
)
def test_what_a_reader_cannot_read_is_found(
    look: ModuleType, chromium: str, tmp_path: Path, body: str, fault: str
) -> None:
    assert any(
        line.endswith(fault)
        for line in look.faults_of(page_with(body, tmp_path), chromium)
    )


# The menu of releases


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with two releases. Only the later one has a tutorial."""
    monkeypatch.syspath_prepend(SITE)
    publish = importlib.import_module("publish").publish
    site, folder = tmp_path / "site", tmp_path / "public"
    for page in ("index.html", "guide/index.html", "tutorial/index.html", "404.html"):
        (site / page).parent.mkdir(parents=True, exist_ok=True)
        (site / page).write_text(f"<header></header>{page}")
    publish(site, folder, "0.10.0")
    shutil.rmtree(site / "tutorial")
    publish(site, folder, "0.9.0")
    return folder


def test_the_menu_finds_which_pages_a_release_has(published: Path) -> None:
    """The script of the theme reads them from the sitemap, which was empty.

    Each entry led to a home page.
    """
    pages = {
        release: re.findall(
            r"<loc>https://[^/]+/(.*)</loc>",
            (published / release / "sitemap.xml").read_text(),
        )
        for release in ("0.9", "0.10", "latest")
    }
    assert pages == {
        "0.9": ["", "guide/"],
        "0.10": ["", "guide/", "tutorial/"],
        "latest": ["", "guide/", "tutorial/"],
    }


def test_a_release_of_an_earlier_program_gets_its_sitemap_too(published: Path) -> None:
    (published / "0.9" / "sitemap.xml").write_text("<urlset></urlset>")
    importlib.import_module("publish").publish(published / "0.10", published, "0.11.0")
    assert "guide/" in (published / "0.9" / "sitemap.xml").read_text()


def test_without_javascript_a_page_links_to_the_home_pages_of_all_releases(
    published: Path,
) -> None:
    for page, up in (("index.html", "../"), ("guide/index.html", "../../")):
        text = (published / "0.9" / page).read_text()
        assert text.startswith(
            f'<header><noscript><a class="releases" href="{up}releases.html">'
        )
    listed = re.findall(r'href="([^"]+)"', (published / "releases.html").read_text())
    assert listed == ["0.10/", "0.9/"]
    assert all((published / home / "index.html").exists() for home in listed)


CLICK = """
async function chosen(page, release) {
  const frame = document.createElement("iframe");
  document.body.append(frame);
  await new Promise(done => { frame.onload = done; frame.src = page; });
  let link;
  while (!(link = frame.contentDocument.querySelector(`.md-version__link[href$="/${release}/"]`)))
    await new Promise(done => setTimeout(done, 50));
  const left = new Promise(done => { frame.onload = done; });
  link.click();
  await left;
  return frame.contentWindow.location.pathname;
}
(async () => [
  await chosen("/0.10/guide/", "0.9"), await chosen("/0.10/tutorial/", "0.9"), await chosen("/0.9/guide/", "0.10")
])().catch(error => String(error)).then(answer);
"""  # noqa: E501


def test_the_menu_leads_to_the_same_page_of_another_release(
    look: ModuleType, chromium: str, published: Path, tmp_path: Path
) -> None:
    """With the theme's own script, on pages that Zensical has made.

    The earlier release has no tutorial.
    """
    built = with_theme(tmp_path / "theme")
    for release in ("0.9", "0.10"):
        shutil.copytree(
            built,
            published / release,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("sitemap.xml"),
        )
    shutil.rmtree(published / "0.9" / "tutorial")
    assert look.answer_of(CLICK, published, chromium) == [
        "/0.9/guide/",
        "/0.9/",
        "/0.10/guide/",
    ]


def with_theme(folder: Path) -> Path:
    """A site of three pages with a menu of releases, and with no other settings."""
    pytest.importorskip("zensical")
    (folder / "docs").mkdir(parents=True)
    for page in ("index", "guide", "tutorial"):
        (folder / "docs" / f"{page}.md").write_text(f"# {page}\n")
    settings = (
        "site_name: site\ntheme: {name: material, font: false}\nextra: {version: "
        "{provider: mike}}\n"
    )
    (folder / "mkdocs.yml").write_text(settings)
    command = [
        str(Path(sys.executable).with_name("zensical")),
        "build",
        "-f",
        "mkdocs.yml",
    ]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"
