"""Draws docs/images/round.svg, one round of FedAnchor from the command line to the aggregated model.

    python docs/draw_round.py

It has its own background, for light and dark pages.
"""

import html
import pathlib

WIDTH, MARGIN, GAP, LINE = 760, 24, 26, 21
LANE = (WIDTH - 3 * MARGIN) // 2
SERVER, CLIENT, WIDE = (MARGIN, LANE), (2 * MARGIN + LANE, LANE), (MARGIN, WIDTH - 2 * MARGIN)  # x, width
COLOURS = {"run": ("#eceff4", "#8a94a6"), "server": ("#e3ecfb", "#4a76c0"), "client": ("#e4f3e6", "#4a9157")}

# (lane, colour, title, lines in the code's font, lines in words)
RUN = [
    ("run", "1. Words become a configuration", ["cli/commands.py: main, run", "config/load.py: parse_config"], []),
    (
        "run",
        "2. Data, partition, model, method; compiled; initialised and pre-trained",
        [
            "run/train.py: train",
            "run/opening.py: open_runs",
            "run/experiment.py: build_experiments, first_state",
            "data/: load_dataset, make_partition",
        ],
        [],
    ),
    (
        "run",
        "3. Many rounds in one dispatch; each is round_fn(state, data)",
        ["engine/dispatch.py: make_dispatch", "engine/round.py: make_round"],
        [],
    ),
]
ROUND = [
    ("server", "4. Selects a cohort", ["engine/round.py: uniform"], ["M of K clients, drawn at random"]),
    (
        "server",
        "5. Broadcasts",
        ["methods/fedanchor/__init__.py: message", "methods/fedanchor/client.py: class_anchors"],
        ["the model w, its anchors' class means,", "the learning rate"],
    ),
    (
        "client",
        "6. Label their images",
        [
            "methods/fedanchor/__init__.py: label",
            "methods/fedanchor/client.py: class_mean_scores",
            "client/labels.py: label_by_scores",
        ],
        ["cosine to the anchors of each class: eq. 3", "label and fix set: eq. 4, 5", "mix set: eq. 6"],
    ),
    (
        "client",
        "7. Train in lanes",
        ["engine/lanes.py: run_in_lanes", "client/steps.py: step", "client/fix_mix.py: loss"],
        ["SGD on fix and mix set: eq. 7 to 10"],
    ),
    (
        "client",
        "8. Upload",
        ["client/steps.py: finish"],
        ["backbone and classifier, w_m"],
    ),
    (
        "server",
        "9. Aggregates",
        ["server/aggregation.py: fedavg, mean"],
        ["w = sum of n_m w_m / sum of n_m"],
    ),
    (
        "server",
        "10. Trains on its anchors",
        ["server/training.py: train_on_server_labels", "ops/losses.py: label_contrastive_loss"],
        ["an epoch of cross-entropy,", "an epoch of contrast: eq. 1, 2"],
    ),
    (
        "server",
        "11. Tests the model, records the round",
        ["engine/evaluation.py: measure_model", "run/loop.py: run_rounds"],
        ["a line in metrics.jsonl; checkpoints"],
    ),
]
NOTES = ["All files are in fedjax_ssl/;", "equations are those of the FedAnchor paper."]
HEAD = """<title>One round of FedAnchor, from the command line to the aggregated model</title>
<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0,0 L10,5 L0,10 z" fill="#3d4757"/></marker></defs>
<style>
text { font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
text { fill: #1d2430; }
.lane { font-size: 17px; font-weight: 600; }
.title { font-size: 16px; font-weight: 600; }
.code { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; fill: #2c3a55; }
.words { font-size: 14px; }
</style>"""


def box(place: tuple[int, int], y: int, colour: str, title: str, code: list[str], words: list[str]) -> tuple[str, int]:
    """One step's box with its top at y; the markup, and the bottom."""
    (x, width), (fill, edge) = place, COLOURS[colour]
    height = 22 + LINE * (1 + len(code) + len(words))
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{fill}" stroke="{edge}"/>']
    lines = [("title", title), *(("code", line) for line in code), *(("words", line) for line in words)]
    for number, (kind, line) in enumerate(lines):
        text = html.escape(line)
        parts.append(f'<text class="{kind}" x="{x + 14}" y="{y + 26 + LINE * number}">{text}</text>')
    return "\n".join(parts), y + height


def arrow(*points: tuple[int, int]) -> str:
    """An arrow along points."""
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="#3d4757" stroke-width="1.8" marker-end="url(#head)"/>'


def label(x: int, y: int, text: str) -> str:
    """A line of text outside the boxes."""
    return f'<text class="words" x="{x}" y="{y}">{html.escape(text)}</text>'


def draw() -> str:
    """The picture."""
    parts, y = [], MARGIN
    for step in RUN:
        markup, bottom = box(WIDE, y, *step)
        parts += [markup, arrow((WIDTH // 2, bottom), (WIDTH // 2, bottom + GAP - 2))]
        y = bottom + GAP
    top = y
    y += 38
    frame_at = len(parts)
    middle = {lane: place[0] + place[1] // 2 for lane, place in (("server", SERVER), ("client", CLIENT))}
    parts += [
        f'<text class="lane" x="{middle["server"]}" y="{top + 25}" text-anchor="middle">Server</text>',
        f'<text class="lane" x="{middle["client"]}" y="{top + 25}" text-anchor="middle">Clients of the cohort</text>',
    ]
    previous, previous_bottom, previous_top = None, 0, 0
    for lane, *step in ROUND:
        place = {"server": SERVER, "client": CLIENT}[lane]
        if previous in (None, lane):
            if previous:
                parts.append(arrow((middle[lane], previous_bottom), (middle[lane], y - 2)))
            markup, bottom = box(place, y, lane, *step)
        else:  # to the other side, at the height of the step before
            y = previous_top
            markup, bottom = box(place, y, lane, *step)
            edge = SERVER[0] + SERVER[1] if lane == "client" else CLIENT[0]
            target = CLIENT[0] if lane == "client" else SERVER[0] + SERVER[1]
            height = y + 40
            parts.append(arrow((edge, height), (target + (-2 if lane == "client" else 2), height)))
        parts.append(markup)
        previous, previous_bottom, previous_top, y = lane, bottom, y, bottom + GAP
    bottom, height = previous_bottom + MARGIN, previous_top + 40
    parts.append(arrow((SERVER[0] + SERVER[1], height), (CLIENT[0] + 12, height)))
    parts += [label(CLIENT[0] + 22, height + 5, "The next round starts at 4 with this model.")]
    parts += [label(CLIENT[0] + 22, height + 40 + LINE * n, line) for n, line in enumerate(NOTES)]
    frame = (
        f'<rect x="{MARGIN // 2}" y="{top}" width="{WIDTH - MARGIN}" height="{bottom - top}" rx="10" fill="none" '
        'stroke="#b4bccb" stroke-dasharray="6 5"/>'
    )
    parts.insert(frame_at, frame)
    height = bottom + MARGIN
    parts.insert(0, f'<rect width="{WIDTH}" height="{height}" rx="12" fill="#fbfcfe"/>')
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', HEAD, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    file = pathlib.Path(__file__).parent / "images" / "round.svg"
    file.write_text(draw(), encoding="utf-8")
    print(file)
