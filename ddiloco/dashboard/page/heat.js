// How long steps took: a row an island, a column a stretch of time, drawn on a canvas.

import { byId, clockTime, html, listen, mean, percent, say } from "./format.js";

const LEFT = 92,
  RIGHT = 14,
  AXIS = 20,
  TALLEST = 18,
  ROOM = 420; // pixels: of a row, and of all rows
const STEPS = [
  // [least ratio to the median, what the legend says], heat-0 to heat-6
  [0, "quicker than usual"],
  [0.8, "as usual"],
  [1.3, "1.5×"],
  [1.75, "2×"],
  [3, "4×"],
  [6, "8×"],
  [12, "16× its median or more"],
];
const OTHER = {
  w: "waiting for a shard",
  j: "joining",
  s: "stalled",
  q: "quarantined",
  d: "down",
};
let shown = null; // {heat, islands, x, ...} of the last drawing
let cursor = null; // {row, bin}

/** What a letter says: {ratio} to the island's median, or {state}. */
function meaning(heat, letter) {
  const at = heat.levels.indexOf(letter);
  if (at < 0) return { state: OTHER[letter] ?? "not there" }; // a dot
  return { ratio: heat.least_ratio * 2 ** (at / heat.per_octave) };
}

/** The class of a letter's colour: heat-0 (quick) to heat-6 (16 times the median), or heat-w, ... */
function shade(heat, letter) {
  const { ratio } = meaning(heat, letter);
  if (ratio === undefined) return letter;
  return String(STEPS.findLastIndex(([least]) => ratio >= least));
}

function legend(heat) {
  const there = new Set(Object.values(heat.rows).join(""));
  const item = (name, text, hidden) =>
    html("li", { hidden }, html("i", { class: `heat heat-${name}` }), text);
  byId("heat-legend").replaceChildren(
    ...STEPS.map(([, text], i) => item(i, text)),
    ...Object.entries(OTHER).map(([letter, text]) => item(letter, text, !there.has(letter))),
  );
}

/** Colours as the style sheet has them for the present theme. */
function colours() {
  const of = {};
  for (const node of document.querySelectorAll("#heat-legend .heat"))
    of[node.className.split("heat-")[1]] = getComputedStyle(node).backgroundColor;
  return of;
}

export function drawHeat(status) {
  const { heat, islands } = status;
  const known = Object.values(heat.rows).some((row) => /[A-Zw]/.test(row));
  byId("heat-card").hidden = !known;
  if (!known) return;
  legend(heat);
  says(heat, islands);
  const width = Math.max(260, byId("heat").clientWidth);
  const row = Math.max(1, Math.min(TALLEST, Math.floor(ROOM / islands.length)));
  const bins = Math.max(...Object.values(heat.rows).map((each) => each.length));
  const column = (width - LEFT - RIGHT) / Math.max(1, status.seconds / heat.width_seconds);
  shown = { heat, islands, width, row, bins, column, height: row * islands.length };
  paint(byId("heat-canvas"), shown, status.seconds);
  moveTo(cursor);
}

function paint(canvas, { heat, islands, width, row, column, height }, seconds) {
  const scale = window.devicePixelRatio || 1,
    draw = canvas.getContext("2d"),
    fill = colours();
  canvas.width = width * scale;
  canvas.height = (height + AXIS) * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height + AXIS}px`;
  draw.scale(scale, scale);
  const gap = row > 4 ? 1 : 0;
  islands.forEach((island, i) => {
    const letters = heat.rows[island.number] ?? "";
    for (let from = 0; from < letters.length; ) {
      const name = shade(heat, letters[from]);
      let to = from + 1;
      while (to < letters.length && shade(heat, letters[to]) === name) to += 1;
      if (fill[name]) {
        draw.fillStyle = fill[name];
        const end = Math.min(width - RIGHT, LEFT + to * column);
        draw.fillRect(LEFT + from * column, i * row, end - LEFT - from * column, row - gap);
      }
      from = to;
    }
  });
  const style = getComputedStyle(byId("heat"));
  draw.fillStyle = style.color;
  draw.font = `12px ${style.fontFamily}`;
  draw.textBaseline = "middle";
  const write = (text, x, y, align) => {
    draw.textAlign = align;
    draw.fillText(text, x, y);
  };
  const most = Math.max(1, Math.floor(height / 28)); // names
  const every = islands.length > 24 || row < 12 ? Math.ceil(islands.length / most) : 1;
  islands.forEach((island, i) => {
    const y = Math.max(6, (i + 0.5) * row);
    if (i % every === 0) write(`island ${island.number}`, LEFT - 8, y, "right");
  });
  write("0:00", LEFT, height + AXIS / 2 + 2, "left");
  write(`${clockTime(seconds)} min:s`, width - RIGHT, height + AXIS / 2 + 2, "right");
}

/** The slowest lately, in a sentence. */
function says(heat, islands) {
  const late = islands.flatMap((island) => {
    const letters = (heat.rows[island.number] ?? "").replace(/\.+$/, "").slice(-8);
    const ratios = [...letters].map((each) => meaning(heat, each).ratio).filter(Boolean);
    const ratio = mean(ratios);
    return ratio >= 1.5 ? [`island ${island.number} (${ratio.toFixed(1)}×)`] : [];
  });
  const more = late.length > 4 ? ` and ${late.length - 4} more` : "";
  say(
    "heat-says",
    late.length
      ? `slower than usual at the end: ${late.slice(0, 4).join(", ")}${more}`
      : "colours are each island's step time, beside its own median",
  );
}

// --- the cursor -----------------------------------------------------------------------------------

function moveTo(to) {
  cursor = to;
  if (!shown) return;
  const { heat, islands, bins, row, column } = shown,
    line = byId("heat-cursor");
  line.hidden = cursor === null;
  if (cursor === null)
    return byId("heat-readout").replaceChildren(
      "Point at the map, or focus it and use the arrow keys.",
    );
  cursor.row = Math.min(islands.length - 1, Math.max(0, cursor.row));
  cursor.bin = Math.min(bins - 1, Math.max(0, cursor.bin));
  line.style.left = `${LEFT + cursor.bin * column}px`;
  line.style.top = `${cursor.row * row}px`;
  line.style.width = `${Math.max(3, column)}px`;
  line.style.height = `${Math.max(3, row)}px`;
  byId("heat-readout").replaceChildren(...readout(heat, islands[cursor.row], cursor.bin));
}

function readout(heat, island, bin) {
  const { ratio, state } = meaning(heat, heat.rows[island.number]?.[bin] ?? ".");
  const median = heat.median_seconds[island.number];
  const from = bin * heat.width_seconds,
    to = from + heat.width_seconds;
  const time = (seconds) =>
    seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toFixed(0)} ms`;
  const said =
    state ?? `a step took about ${time(ratio * median)}, ${ratio.toFixed(1)}× its median ${time(median)}`;
  const span = `${clockTime(from)}${to - from < 2 ? "" : ` to ${clockTime(to)}`}`;
  const share = island.participation === null ? "" : ` · in ${percent(island.participation)} of commits`;
  return [html("b", null, `island ${island.number}`), ` · ${span} · ${said}${share}`];
}

export function listenToHeat() {
  listen(
    byId("heat"),
    moveTo,
    (x, y) => {
      const bin = Math.floor((x - LEFT) / shown.column),
        row = Math.floor(y / shown.row);
      const inside = bin >= 0 && bin < shown.bins && row >= 0 && row < shown.islands.length;
      return inside ? { row, bin } : null;
    },
    () => {
      const { row, bin } = cursor ?? { row: 0, bin: shown.bins - 1 };
      return {
        ArrowLeft: { row, bin: cursor ? bin - 1 : bin },
        ArrowRight: { row, bin: bin + 1 },
        ArrowUp: { row: row - 1, bin },
        ArrowDown: { row: row + 1, bin },
        PageUp: { row: row - 10, bin },
        PageDown: { row: row + 10, bin },
        Home: { row, bin: 0 },
        End: { row, bin: shown.bins - 1 },
      };
    },
  );
}
