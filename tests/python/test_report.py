"""The HTML report of lmhead score: self-contained, escaped, true to the scores, and readable."""

import html.parser
import json
import re

import command
import numpy as np
import pytest
import safetensors_file as st

N, H, V = 12, 16, 40
TOKENS = ["<b>", "&amp;", '"', " it", "\n", "\t", "\x01", "é", "</script>", " \u2028", "", "end"]
EDGES = [0.25, 1, 2, 3, 4.5, 6.5, 9]


class Page(html.parser.HTMLParser):
    """Tokens (text, classes, title), ids, links, tags and nesting of a page."""

    def __init__(self, text):
        super().__init__()
        self.tokens, self.ids, self.links, self.tags, self.depth, self.eol = [], [], [], set(), None, False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.add(tag)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [attributes[a] for a in ("href", "src") if a in attributes]
        if tag == "div" and attributes.get("class") == "text":
            self.depth = 0
        elif tag == "span" and self.depth is not None:
            self.tokens.append(["", attributes["class"], attributes.get("title")])
        self.eol = tag == "b" and self.depth is not None

    def handle_endtag(self, tag):
        self.eol = False
        if tag == "div":
            self.depth = None

    def handle_data(self, data):
        if self.depth is not None and self.tokens and not self.eol:
            self.tokens[-1][0] += data


@pytest.fixture(params=["input_ids", "targets"])
def report(request, tmp_path):
    r = np.random.default_rng(8)
    ids = r.integers(0, V, N)
    st.write(
        tmp_path / "batch.safetensors",
        {"hidden": r.standard_normal((N, H)).astype(np.float32), request.param: ids, "cu_seqlens": np.array([0, 7, N])},
    )
    st.write(tmp_path / "model.safetensors", {"lm_head.weight": r.standard_normal((V, H)).astype(np.float32)})
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    done = command.run(
        "score", tmp_path / "batch.safetensors", "--model", tmp_path / "model.safetensors", "--json=tokens",
        "--html", tmp_path / "report.html", "--tokens", tmp_path / "tokens.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    return request.param, lines, text, Page(text)


def test_tokens_carry_their_scores(report):
    kind, lines, _, page = report
    rows = {line["row"]: line for line in lines if line["type"] == "token"}
    shown = ["\u2401" if token == "\x01" else token for token in TOKENS]
    assert [token[0] for token in page.tokens] == shown
    for i, (_, classes, title) in enumerate(page.tokens):
        row = i - 1 if kind == "input_ids" else i
        if kind == "input_ids" and i in (0, 7):
            assert classes == "u" and title is None
            continue
        surprisal, entropy = -rows[row]["logprob"], rows[row]["entropy"]
        assert classes == f"s{np.searchsorted(EDGES, surprisal, 'right')} e{np.searchsorted(EDGES, entropy, 'right')}"
        assert title.startswith(f"surprisal {surprisal:.3f}, entropy {entropy:.3f}, row {row}, id ")


def test_page_stands_alone(report):
    _, lines, text, page = report
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links) and page.links
    assert "url(" not in text and "@import" not in text and not page.tags & {"img", "link", "iframe", "object"}
    assert len(page.ids) == len(set(page.ids))
    assert text.count("<script>") == text.count("</script>") == 1  # the token "</script>" is escaped
    summary = lines[-1]
    assert f"{-summary['mean_logprob']:.3f}" in text and f"{summary['mean_entropy']:.3f}" in text


def test_ids_without_tokens(tmp_path, report):
    done = command.run(
        "score", tmp_path / "batch.safetensors", "--model", tmp_path / "model.safetensors", "--html", tmp_path / "r.html"
    )
    assert done.returncode == 0
    assert all(re.fullmatch(r"#\d+ ", token) for token, _, _ in Page((tmp_path / "r.html").read_text()).tokens)


def contrast(a, b):
    """WCAG contrast ratio of two #rrggbb colours."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return np.dot(parts, [0.2126, 0.7152, 0.0722])

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_every_colour_is_readable(report, theme):
    roots = re.findall(r":root\{(.*?)\}", report[2], re.S)
    assert len(roots) == 2
    colours = dict(re.findall(r"--(\w+):(#\w{6})", roots[theme]))
    pairs = [("page", "ink"), ("page", "soft"), ("card", "ink"), ("card", "soft"), ("page", "focus")]
    pairs += [(f"{ramp}{step}", f"{ramp}{step}i") for ramp in "se" for step in range(1, 8)]
    for background, ink in pairs:
        ratio = contrast(colours[background], colours[ink])
        assert ratio >= 4.5, (background, ink, ratio)
