"""Pages: words, lines, links and measured figures, each in a record. Docstrings: first words."""

import re
import subprocess
from decimal import Decimal
from pathlib import Path

import pytest
import yaml

import kdjax

REPOSITORY = Path(__file__).parents[1]
RECORDS = REPOSITORY / "docs" / "records"
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
LINKING = [*PAGES, *RECORDS.glob("*.md"), *(REPOSITORY / "contracts").glob("*.md")]
LINKING += [REPOSITORY / name for name in ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")]
WORDS, WIDTH = 1_200, 120  # of a page, of a line

# What is no measurement: settings and their limits, sizes by arithmetic, others' reports.
SETTINGS = {
    "cleanup.md": ("at most 34 MB",),
    "cached_teacher.md": ("12 = 332", "a billion positions | 332 GB", "shard is 512 MB"),
    "cluster.md": ("within 12 seconds", "120 s before the time limit"),
    "dispatch.md": ("(1.5e-5)",),
    "health.md": (
        "over 25%",
        "over 100 times",
        "200 times for",
        "below 1.06",
        "above 98%",
        "above 35% of",
        "above 20% of",
        "by 0.03 nats",
        "1,024 and 5%",
        "over 0.2 nats",
    ),
    "passk.md": ("top-p 0.95", "tells 8 points"),
    "sandbox.md": ("Defaults: 15 s",),
    "export.md": ("above 5 GB",),
    "models.md": ("below 1.2e-38",),
    "onpolicy.md": ("at most 1e-5",),
    "plan.md": (
        "of 40 GB",
        "all but 2 GiB",
        "gets 90%",
        "adds 15%",
        "| 90%:",
        "| 85%:",
        "8 GiB and a tenth, 10 to 75%; 4 GiB",
        "own, 75%",
        "take 75%",
        "of 128 GB failed near 30 GB",
    ),
    "untrusted.md": ("below 1e-3 nats", "above 98%"),
    "settings.md": ("than 200 kB", "34 MB of each file"),
    "troubleshooting.md": ("below 1e-3 nats", "above 98%"),
}

PACKAGES = "jax|Python|PyTorch|[Tt]orch|[Tt]ransformers|xllamacpp|TRL|Axolotl"
VERSION = rf"arXiv:[\d.]+|\b(?:{PACKAGES}) \d+(?:\.\d+)+"
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?"
UNIT = (
    r"%|(?:tokens|tok|positions|rows|TFLOP|GB|TB)/s\b|(?:tokens|positions|rows|answers) a second\b"
    r"|(?:ms|us|GB|MB|kB|GiB|s|seconds|nats|points|times|TFLOP|W)\b(?!/)"
)
MEASURED = re.compile(
    rf"(?<![\w.,/-])(?P<first>{NUMBER}(?:,? (?:to|and|or|for|instead of) {NUMBER})*) ?(?:{UNIT})"
    rf"|(?<![\w.,/-])(?P<bare>\d+\.\d\d+(?:e-?\d+)?|\d\.\d+e-\d+)(?![\w.])"
)


def sections(page):
    """Headings and texts of a page, without fenced blocks."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    parts = re.split(r"^(#+ .*)$", text, flags=re.M)
    return zip(["(top)", *parts[1::2]], [parts[0], *parts[2::2]], strict=True)


def figures(text, settings=()):
    """Measured figures of a text: numbers with a unit, with two decimals or more, of a table."""
    text = re.sub(r"(?<=[^|\n])\n(?=[^|\n])", " ", text)  # prose is wrapped anywhere
    text = re.sub(rf"`[^`]*`|\]\([^)]*\)|https?://\S+|{VERSION}", "`", text)
    for phrase in settings:
        text = text.replace(phrase, "")
    for match in MEASURED.finditer(text):
        yield from re.findall(NUMBER, match["first"] or match["bare"])
    for row in re.findall(r"^ *\|(.*)\|$", text, flags=re.M):
        for cell in row.split("|")[1:]:  # the first names the row
            if re.fullmatch(rf"[ *]*{NUMBER}[ *]*", cell):
                yield cell.strip(" *")


def numbers(text):
    """Every number of a record, front matter apart."""
    text = text.split("---\n", 2)[2]
    return {Decimal(found.replace(",", "")) for found in re.findall(NUMBER, text)}


def is_found(figure, among):
    """Whether one of these numbers is the figure, or rounds to it."""
    plain = figure.replace(",", "")
    value = Decimal(plain)
    digits = len(plain) - len(plain.rstrip("0")) if re.fullmatch(r"\d{4,}", plain) else 0
    half = Decimal(10) ** (digits or value.as_tuple().exponent) / 2
    return any(abs(value - number) <= half for number in among)


def heading_anchors(page):
    """Anchors that GitHub gives the headings of a page."""
    for heading, _ in sections(page):
        words = re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower())
        yield words.replace(" ", "-")


def is_table(line):
    return line.lstrip().startswith("|")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_at_most_1200_words_in_lines_of_120(page):
    """A reference, a page with more than half of its words in tables, may be longer.

    Tables and code do not wrap.
    """
    lines = page.read_text().splitlines()
    words = sum(len(line.split()) for line in lines)
    in_tables = sum(len(line.split()) for line in lines if is_table(line))
    assert words <= WORDS or in_tables > words / 2, f"{words} words"
    prose = [line for _, text in sections(page) for line in text.splitlines() if not is_table(line)]
    assert not [line for line in prose if len(line) > WIDTH]


def test_links_lead_to_files_and_headings():
    broken = []
    for page in LINKING:
        for _, text in sections(page):
            for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
                if re.match(r"https?://", target):
                    continue
                path, _, anchor = target.partition("#")
                file = page.parent / path if path else page
                if not file.exists() or (anchor and anchor not in heading_anchors(file)):
                    broken.append(f"{page.relative_to(REPOSITORY)}: {target}")
    assert not broken, "\n".join(broken)


def test_pages_that_code_names_exist():
    """Errors, help texts and docstrings send a user there."""
    folders = ("kdjax", "configs", "scripts", "examples", "contracts")
    files = [
        p for f in folders for p in (REPOSITORY / f).rglob("*") if p.suffix in (".py", ".yaml")
    ]
    named = {
        (str(path.relative_to(REPOSITORY)), page)
        for path in files
        for page in re.findall(r"(?<![\w/])docs/\w+\.md", path.read_text())
    }
    assert len(named) > 10
    assert not [(path, page) for path, page in named if not (REPOSITORY / page).exists()]


def test_the_menu_of_the_site_has_every_page_once():
    menu = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:")[2]
    found = re.findall(r"^ +- [^:]+: (\S+)$", menu, flags=re.M)
    pages = [str(page.relative_to(REPOSITORY)) for page in PAGES]
    other = ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"]
    other += [f"{folder}/README.md" for folder in ("contracts", "docs/records", "examples")]
    assert sorted(found) == sorted([*pages, *other])


def test_papers_of_docstrings_are_linked_under_the_title_of_a_page():
    sources = "".join(path.read_text() for path in (REPOSITORY / "kdjax").rglob("*.py"))
    cited = set(re.findall(r"arXiv:(\d{4}\.\d{5})", sources))
    methods = [re.search(r"^Methods: (?:.+\n)+", page.read_text(), flags=re.M) for page in PAGES]
    linked = re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})", "".join(m[0] for m in methods if m))
    no_page = {"2210.17323", "2305.16264"}  # GPTQ is a benchmark's; a warning's limit of 4 epochs
    assert len(cited) > 15
    missing = cited - set(linked) - no_page
    assert not missing


def test_lists_are_lists_on_the_site():
    """Python-Markdown needs an empty line before a list, and four spaces before an inner item."""
    item = r"(?:[-*+]|\d+\.) "
    unseen = re.compile(rf"^(?!{item}|[\s|]).+\n{item}.*|^ {{1,3}}{item}.*", flags=re.M)
    found = [
        f"{page.name}: {match[0]}"
        for page in LINKING
        for _, text in sections(page)
        for match in unseen.finditer(text)
    ]
    assert not found, "\n".join(found)


def test_the_reference_has_every_public_name_once():
    page = (REPOSITORY / "docs" / "api.md").read_text()
    named = re.findall(r"^::: kdjax\.(\w+)$", page, flags=re.M)
    assert sorted(named) == sorted(set(kdjax.__all__) - {"__version__"})


@pytest.mark.parametrize("record", sorted(RECORDS.glob("2*.md")), ids=lambda record: record.stem)
def test_a_record_says_what_was_run_and_where_its_json_is(record):
    _, front, body = record.read_text().split("---\n", 2)
    front = yaml.safe_load(front)
    asked = {"title", "date", "revision", "command", "hardware", "versions", "json"}
    assert asked <= set(front) <= asked | {"log"} and all(front.values()), record
    assert record.name[:10] in front["date"]
    if front["json"] == "none":
        assert "JSON that made these tables was not kept" in body[:300]
    else:
        assert (RECORDS / front["json"]).exists()
    assert "log" not in front or (RECORDS / front["log"]).exists()
    assert f"({record.name})" in (RECORDS / "README.md").read_text()


def test_revisions_of_records_are_commits_of_this_history():
    """A measured commit that never landed is in no clone; the record names the one that did."""

    def git(*arguments):
        done = subprocess.run(("git", *arguments), cwd=REPOSITORY, capture_output=True, text=True)
        return done.stdout.split()

    if git("rev-parse", "--is-shallow-repository") != ["false"]:
        pytest.skip("no clone with all commits")
    commits = git("rev-list", "HEAD")
    named = [
        (sha, path.name)
        for path in sorted(RECORDS.glob("2*.md"))
        for sha in re.findall(r"\b[0-9a-f]{7,40}\b", re.search("revision: .*", path.read_text())[0])
    ]
    known = {commit[: len(sha)] for sha, _ in named for commit in commits}
    assert len(named) > 100
    assert not [(sha, name) for sha, name in named if sha not in known]


def test_figures_of_pages_are_in_the_records_that_their_section_links():
    """Rounding is allowed. A small whole number is in most records: this sees wrong digits."""
    missing = []
    for page in PAGES:
        for heading, text in sections(page):
            linked = {RECORDS / name for name in re.findall(r"records/(2[\w-]+\.md)", text)}
            among = set().union(*(numbers(record.read_text()) for record in linked))
            missing += [
                f"{page.name}, {heading}: {figure}"
                for figure in figures(text, SETTINGS.get(page.name, ()))
                if not is_found(figure, among)
            ]
    assert not missing, "no record that the section links has\n" + "\n".join(missing)


def test_no_docstring_begins_without_its_subject():
    found = []
    for path in [*REPOSITORY.glob("[kst]*/**/*.py"), *REPOSITORY.glob("configs/*.py")]:
        first = re.findall(r'^ *[a-z]?"""(?:As|Of|What|That)\b.*', path.read_text(), flags=re.M)
        found += [f"{path.relative_to(REPOSITORY)}: {line.strip()}" for line in first]
    assert not found, "\n".join(found)


def test_the_changes_and_the_citation_name_the_version():
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    (version, date), *_ = re.findall(r"^## \[(.+)\] - (.+)$", changes, re.M)
    assert version == kdjax.__version__
    citation = (REPOSITORY / "CITATION.cff").read_text()
    assert f"\nversion: {version}\ndate-released: {date}\n" in citation
