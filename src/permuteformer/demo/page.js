"use strict";

// The server computes every number with the library. This file asks for the numbers and draws them.

const $ = (id) => document.getElementById(id);
const value = (id) => Number($(id).value);
const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;

const KINDS = {
  lm: { axes: 1, causal: true, r: "paper" },
  encoder: { axes: 1, causal: false, r: "default half-lives" },
  image: { axes: 2, causal: false, r: "default half-lives" },
};
const AXES = [ // of an image, by the axis along which a head counts
  { along: "rows", distance: "i − j (columns)" },
  { along: "columns", distance: "i − j (rows)" },
];

// ---- Requests

// Posts a request and returns the last line of JSON of the answer; onPiece receives every line as it arrives.
async function ask(path, body, signal, onPiece = () => {}) {
  const answer = await fetch(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json()).error);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let piece, rest = "";
  for (;;) {
    const { value: text, done } = await reader.read();
    if (done) return piece;
    const lines = (rest + text).split("\n");
    rest = lines.pop();
    for (const line of lines) onPiece(piece = JSON.parse(line));
  }
}

function showProblem(place, error = null) {
  if (error?.name === "AbortError") return;
  place.hidden = !error;
  if (error) place.textContent = error instanceof TypeError ? "No answer from the server: is permuteformer demo still running?" : error.message;
}

// ---- Elements

function svg(parent, name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, content] of Object.entries(attributes)) made.setAttribute(key, content);
  made.textContent = text;
  parent.append(made);
  return made;
}

function html(parent, name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  made.className = className;
  parent.append(made);
  return made;
}

// Paints a pixel per number: color(x, y) is a colour, or a colour and its opacity.
function paint(canvas, width, height, color) {
  [canvas.width, canvas.height] = [width, height];
  const pen = canvas.getContext("2d");
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    [pen.fillStyle, pen.globalAlpha] = [color(x, y), 1].flat();
    pen.fillRect(x, y, 1, 1);
  }
}

// Every slider shows its value in its label.
function showValue(slider) {
  const shown = slider.closest("label")?.querySelector("b");
  if (shown) shown.textContent = slider.value;
}
document.addEventListener("input", (event) => showValue(event.target));
document.querySelectorAll("input[type=range]").forEach(showValue);

// ---- One head

let head = null; // the server's numbers
let asking = null;

async function refresh() {
  const name = chosen("kind"), { axes, causal, r } = KINDS[name];
  for (const part of document.querySelectorAll("[data-kind]")) part.hidden = !part.dataset.kind.split(" ").includes(name);
  $("default-r").textContent = r;
  $("rate-label").hidden = $("decay").value !== "number";
  $("seed").disabled = $("next").disabled = $("permutation").value === "none";
  $("position-name").textContent = axes === 1 ? "Position" : "Column";
  asking?.abort();
  asking = new AbortController();
  try {
    head = await ask("/api/positions", {
      features: value("features"), permutation: $("permutation").value, seed: value("seed"), head: value("head"), axes, causal,
      r: { default: "default", number: value("rate"), none: null }[$("decay").value], alike: chosen("alike") === "true",
    }, asking.signal);
    showProblem($("problem"));
    drawHead();
  } catch (error) { showProblem($("problem"), error); }
}

function drawHead() {
  drawRings();
  drawField();
  drawFacts();
  drawMaps();
  drawPosition();
}

// The colour of every feature: hues go around each cycle. A feature that never moves is grey.
function colors() {
  const found = [];
  head.cycles.forEach(({ features }, number) => features.forEach((feature, rank) => {
    found[feature] = features.length === 1 ? "hsl(215 8% 65%)" : `hsl(${360 * rank / features.length + 40 * number} 68% 64%)`;
  }));
  return found;
}

let beads = []; // of every feature: its element, and its place on the ring of its cycle
function drawRings() {
  $("rings").replaceChildren();
  const zoom = head.axis.length <= 16 ? 1.6 : head.axis.length <= 32 ? 1.3 : 1.1, color = colors();
  for (const { axis, features } of head.cycles) {
    const n = features.length, radius = n === 1 ? 0 : Math.max(16, n * 3.5), half = radius + 26;
    const ring = svg($("rings"), "svg", { viewBox: `${-half} ${-half} ${2 * half} ${2 * half}`, width: 2 * half * zoom });
    if (n > 1) {
      svg(ring, "circle", { r: radius, class: "ring" });
      svg(ring, "line", { y1: -radius - 13, y2: -radius - 22, class: "start" });
      const named = head.axes === 2 && radius > 24;
      svg(ring, "text", { class: "name", y: named ? -6 : 0 }, n);
      if (named) svg(ring, "text", { class: "name", y: 8 }, ["column", "row"][axis]);
    }
    features.forEach((feature, rank) => {
      const element = svg(ring, "g");
      svg(element, "circle", { r: 10, fill: color[feature] });
      svg(element, "text", {}, feature);
      beads[feature] = { element, n, radius, rank, at: rank, turns: rank / n };
    });
  }
  beads.length = head.axis.length;
}

function drawField() {
  const color = colors();
  paint($("field"), head.axis.length, head.places.length, (x, y) => color[head.places[y][x]]);
  $("field").setAttribute("aria-label", `${head.places.length} positions of ${head.axis.length} features`);
}

function drawFacts() {
  const lengths = [0, 1].map((axis) => head.cycles.filter((cycle) => cycle.axis === axis).map((cycle) => cycle.features.length).sort((a, b) => b - a));
  const unit = head.axes === 1 ? "tokens" : "pixels";
  const facts = [
    ["Cycles", lengths.filter((some) => some.length).map((some) => some.join(" ")).join(" | ")],
    ["Order of the head", head.order.join(" × ")],
    ["All 8 heads repeat after", head.axes === 1 ? `${head.reach[0]} tokens` : `${head.reach[0]} columns × ${head.reach[1]} rows`],
  ];
  if (head.r !== null) facts.push(["r", head.r.toFixed(4)], ["Half-life", head.half_life === null ? "none: no decay" : `${head.half_life.toFixed(1)} ${unit}`]);
  for (const warning of head.warnings) facts.push(["Note", warning]);
  $("facts").replaceChildren();
  for (const [name, text] of facts) { html($("facts"), "dt", name); html($("facts"), "dd", text); }
  $("along").textContent = head.r === null || head.axes === 1 ? "" : `This head counts along ${AXES[head.decay_axis].along}.`;
}

function drawMaps() {
  const most = Math.max(...Object.values(head.map).flat(2));
  for (const [name, rows] of Object.entries(head.map)) {
    const { color } = getComputedStyle($(name));
    paint($(name), rows.length, rows.length, (x, y) => [color, Math.sqrt(rows[y][x] / most)]); // the root makes small weights visible
  }
}

// ---- The position

const shownPosition = () => [value("position"), value(head.axes === 1 ? "position" : "row")];

function drawPosition() {
  const position = shownPosition();
  for (const { axis, features } of head.cycles) features.forEach((place, rank) => { beads[head.places[position[axis]][place]].at = rank; });
  for (const bead of beads) {
    const way = bead.at / bead.n - bead.turns;
    bead.turns += way - Math.round(way); // the shorter way around
    bead.element.style.transform = `rotate(${bead.turns}turn) translateY(${-bead.radius}px) rotate(${-bead.turns}turn)`;
  }
  $("back").textContent = `${beads.filter((bead) => bead.at === bead.rank).length} of ${beads.length} features are back in place.`;

  const rows = head.places.length, share = head.axis.filter((axis) => axis === 0).length / beads.length; // of the features of axis 0
  document.querySelectorAll(".frame").forEach((frame, axis) => {
    const [left, width] = axis === 0 ? [0, share] : [share, 1 - share];
    frame.hidden = !width;
    Object.assign(frame.style, {
      top: `calc(${100 * position[axis] / rows}% - 2px)`, height: `calc(${100 / rows}% + 4px)`, left: `${100 * left}%`, width: `${100 * width}%`,
    });
  });
  drawScores(position[head.decay_axis]);
}

function drawScores(here) {
  const box = $("scores"), width = box.clientWidth, left = 44, right = width - 14, top = 14, bottom = 206;
  box.replaceChildren();
  const { distances, permuteformer, performer, similarity } = head, first = distances[0], last = distances.at(-1);
  const most = Math.max(1, ...permuteformer, ...similarity);
  const x = (distance) => left + (right - left) * (distance - first) / (last - first);
  const y = (score) => bottom - (bottom - top) * score / most;
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    svg(box, "line", { x1: left, x2: right, y1: y(tick), y2: y(tick), class: "axis" });
    svg(box, "text", { x: left - 22, y: y(tick) + 4 }, tick);
  }
  for (let tick = first; tick <= last; tick += width < 500 ? 16 : 8) svg(box, "text", { x: x(tick), y: bottom + 18 }, `${tick}`.replace("-", "−"));
  svg(box, "text", { x: (left + right) / 2, y: bottom + 38 }, head.axes === 1 ? "i − j (tokens)" : AXES[head.decay_axis].distance);
  if (first < 0) {
    svg(box, "text", { x: left + 36, y: bottom + 38 }, "← keys after");
    svg(box, "text", { x: right - 40, y: bottom + 38 }, "keys before →");
  }
  const line = (scores) => scores.map((score, n) => `${n ? "L" : "M"}${x(distances[n])} ${y(score)}`).join("");
  similarity.forEach((score, n) => svg(box, "circle", { cx: x(distances[n]), cy: y(score), r: first < 0 ? 2 : 3, class: "similarity" }));
  svg(box, "path", { d: line(performer), class: "theirs" });
  svg(box, "path", { d: line(permuteformer), class: "ours" });
  const index = distances.indexOf(here);
  if (index >= 0) {
    svg(box, "line", { x1: x(here), x2: x(here), y1: top, y2: bottom, class: "here" });
    svg(box, "circle", { cx: x(here), cy: y(permuteformer[index]), r: 6, class: "dot" });
  }
  $("score-text").textContent = index < 0 ? "" : `At distance ${here}: ${permuteformer[index].toFixed(3)} with PermuteFormer, ${performer[index].toFixed(3)} with Performer.`;
}

let timer = null;
function play(on) {
  clearInterval(timer);
  timer = null;
  $("play").textContent = on ? "Pause" : "Play";
  $("play").setAttribute("aria-pressed", on);
  let ticks = 0;
  if (on) timer = setInterval(() => {
    const slider = head.axes === 2 && ticks++ % 2 ? $("row") : $("position");
    slider.value = (Number(slider.value) + 1) % (Number(slider.max) + 1);
    showValue(slider);
    drawPosition();
  }, 650);
}

let waiting = null;
$("controls").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(refresh, 120); });
$("next").addEventListener("click", () => { $("seed").value = (value("seed") + 1) % 2147483648; refresh(); });
for (const id of ["position", "row"]) $(id).addEventListener("input", () => { if (head) drawPosition(); });
$("play").addEventListener("click", () => { if (head) play(timer === null); });
window.addEventListener("resize", () => { if (head) drawPosition(); });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (head) drawMaps(); });
for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());

// ---- A trained model

let run = null;

function showModel() {
  const lm = run.kind === "lm", match = run.kind === "match";
  $("model").hidden = false;
  $("model-title").textContent = `A trained model: ${run.name}`;
  $("model-text").textContent = lm ? "A language model. Type the beginning of a text, and the model continues it token by token."
    : `Labels for ${match ? "two texts" : run.image ? "an image" : "a text"}: ${run.labels.join(", ")}.`;
  $("text-label").firstChild.textContent = lm ? "Beginning of a text" : match ? "First text" : "Text";
  $("text-label").hidden = run.image;
  $("second-label").hidden = !match;
  $("image-label").hidden = !run.image;
  $("predict").hidden = lm;
  $("generate").hidden = $("sampling").hidden = !lm;
}

async function item() {
  if (!run.image) return run.kind === "match" ? { text: $("text").value, second: $("second").value } : { text: $("text").value };
  const file = $("image").files[0];
  if (!file) throw new Error("Choose an image first.");
  if (file.size > 700000) throw new Error("The image must have at most 700,000 bytes.");
  const reader = new FileReader();
  await new Promise((resolve) => { reader.onloadend = resolve; reader.readAsDataURL(file); });
  if (reader.error) throw new Error("The image cannot be read.");
  return { image: reader.result.split(",")[1] };
}

function onClick(id, sentence, work) {
  $(id).addEventListener("click", async () => {
    const buttons = ["predict", "generate", "explain"].map($);
    for (const button of buttons) button.disabled = true;
    $("working").textContent = sentence;
    showProblem($("model-problem"));
    try { await work(); } catch (error) { showProblem($("model-problem"), error); }
    for (const button of buttons) button.disabled = false;
    $("working").textContent = "";
  });
}

onClick("predict", "predicting …", async () => drawBars((await ask("/api/predict", await item())).probabilities));
onClick("explain", "computing gradients …", async () => drawAttribution(await ask("/api/explain", await item())));

const generating = { stop: null };
onClick("generate", "generating …", async () => {
  const prompt = $("text").value, place = $("generated");
  generating.stop = new AbortController();
  $("stop").hidden = place.hidden = false;
  place.replaceChildren();
  html(place, "span", prompt, "muted");
  const text = place.appendChild(document.createTextNode(""));
  const body = { prompt, tokens: value("tokens"), temperature: value("temperature"), seed: value("text-seed") };
  try {
    const last = await ask("/api/generate", body, generating.stop.signal, (piece) => {
      text.data += piece.text ?? "";
      place.scrollTop = place.scrollHeight;
    });
    if (last.tokens === undefined) throw new Error("The server stopped before the end of the text.");
  } finally { $("stop").hidden = true; }
});
$("stop").addEventListener("click", () => { generating.stop.abort(); $("generate").focus(); });

function drawBars(shares) {
  $("bars").replaceChildren();
  $("bars").hidden = false;
  for (const [name, share] of Object.entries(shares).sort((a, b) => b[1] - a[1]).slice(0, 10)) {
    html($("bars"), "span", name.trim() || JSON.stringify(name));
    html(html($("bars"), "span", "", "bar"), "span").style.width = `${100 * share}%`;
    html($("bars"), "span", `${(100 * share).toFixed(1)} %`, "share");
  }
}

function drawAttribution(found) {
  drawBars(found.answers);
  $("attribution").hidden = false;
  $("attribution-text").textContent = found.message;
  $("attributed").replaceChildren();
  const spans = found.parts.flatMap((part) => part.spans);
  const most = Math.max(...spans.map((span) => Math.abs(span.value))) || 1;
  if (found.grid) drawAttributedImage(found.parts[0], found.grid);
  else for (const part of found.parts) drawAttributedText(part, most, found.unit);

  const signed = (number) => number === null ? "" : (number >= 0 ? "+" : "") + (most >= 0.02 ? number.toFixed(3) : number.toExponential(1));
  $("largest").replaceChildren();
  const header = html(html($("largest"), "thead"), "tr"), body = html($("largest"), "tbody");
  [found.grid ? "patch" : "word", "value", "blanked out"].forEach((name, n) => { html(header, "th", name, n ? "number" : "").scope = "col"; });
  for (const span of spans.sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, 8)) {
    const line = html(body, "tr"), first = span.places[0];
    html(line, "td", found.grid ? `row ${Math.floor(first / found.grid[1]) + 1}, column ${first % found.grid[1] + 1}` : span.text.trim() || "(blank)");
    html(line, "td", signed(span.value), "number");
    html(line, "td", signed(span.measured), "number");
  }
}

function drawAttributedText(part, most, unit) {
  const text = html($("attributed"), "p", "", "text");
  for (const span of part.spans) {
    const word = span.text.trimEnd(), size = Math.abs(span.value) / most;
    html(text, "span", word, size < 0.2 ? "" : `${span.value > 0 ? "for" : "against"}${size < 0.6 ? 1 : 2}`);
    text.append(unit === "bytes" ? span.text.slice(word.length) : " ");
  }
}

function drawAttributedImage(part, [height, width]) {
  const most = Math.max(...part.values.map(Math.abs)) || 1, shade = (n) => `rgb(${part.tokens[n]} ${part.tokens[n]} ${part.tokens[n]})`;
  const values = (n) => [part.values[n] > 0 ? "#f59b14" : "#2f86d6", Math.sqrt(Math.abs(part.values[n]) / most)];
  for (const [label, color] of [["The image", shade], ["For (orange) and against (blue) the answer", values]]) {
    const canvas = html($("attributed"), "canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", label);
    paint(canvas, width, height, (x, y) => color(y * width + x));
  }
}

// ---- Start

refresh();
fetch("/api/about").then((answer) => answer.json()).then((about) => {
  $("version").textContent = about.version;
  run = about.run;
  if (run) showModel();
}).catch((error) => showProblem($("problem"), error));
