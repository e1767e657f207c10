"use strict";

// Three parts: the controls request the numbers of one head, the player moves through positions, and the model answers.
// The library computes every number; this file only draws.

const $ = (id) => document.getElementById(id);
const still = window.matchMedia("(prefers-reduced-motion: reduce)");
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const STEP = 650; // milliseconds per position
const KINDS = {
  lm: { axes: 1, causal: true, r: "paper" },
  encoder: { axes: 1, causal: false, r: "default half-lives" },
  image: { axes: 2, causal: false, r: "default half-lives" },
};
const ORDERS = [ // of a head of an image, by the axis it counts along
  { along: "rows", counted: "row by row", distance: "i − j (columns)" },
  { along: "columns", counted: "column by column", distance: "i − j (rows)" },
];

let head = null; // the server's answer about the chosen head
let shown = { x: 0, y: 0 }; // the visible position
let timer = null;

// ---- requests to the server

async function ask(path, body, signal) {
  const options = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(path, { ...options, signal });
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error);
  return content;
}

function tell(place, error) {
  if (error?.name === "AbortError") return;
  place.hidden = !error;
  place.textContent = error ? (error instanceof TypeError ? "No answer from the server: is permuteformer demo still running?" : error.message) : "";
}

const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;
const kind = () => KINDS[chosen("kind")];
const axes = () => kind().axes;

function choice() {
  const r = { default: "default", number: Number($("rate").value), none: null }[$("decay").value];
  return {
    features: Number($("features").value), permutation: $("permutation").value, seed: Number($("seed").value), head: Number($("head").value),
    r, axes: axes(), causal: kind().causal, alike: chosen("alike") === "true",
  };
}

let asking = null;
async function refresh() {
  $("features-shown").value = $("features").value;
  $("rate-shown").value = Number($("rate").value).toFixed(2);
  $("rate-control").hidden = $("decay").value !== "number";
  $("decay-default").textContent = kind().r;
  for (const part of document.querySelectorAll("[data-kind]")) part.hidden = !part.dataset.kind.split(" ").includes(chosen("kind"));
  $("seed").disabled = $("draw").disabled = $("permutation").value === "none";
  $("row-control").hidden = axes() === 1;
  $("position-name").textContent = axes() === 1 ? "Position i" : "Column";
  asking?.abort();
  asking = new AbortController();
  try {
    head = await ask("/api/positions", choice(), asking.signal);
    tell($("problem"), null);
    drawRings(); drawField(); drawFacts(); drawMaps(); move();
  } catch (error) { tell($("problem"), error); }
}

let waiting = null;
$("controls").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(refresh, 120); });
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("draw").addEventListener("click", () => { $("seed").value = (Number($("seed").value) + 1) % 2147483648; refresh(); });
window.addEventListener("resize", () => { if (head) drawScores(); });
dark.addEventListener("change", () => { if (head) { drawField(); drawMaps(); } });

// ---- drawing

function element(parent, name, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  parent.append(made);
  return made;
}

function item(parent, name, text = "", kind = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (kind) made.className = kind;
  parent.append(made);
  return made;
}

// The colour of a feature: hues run around every cycle, so that neighbours have similar colours.
function hue(cycle, rank) {
  const length = head.cycles[cycle].features.length;
  return length === 1 ? null : (360 * rank / length + 40 * cycle) % 360;
}
function color(cycle, rank) {
  const angle = hue(cycle, rank);
  return angle === null ? (dark.matches ? "hsl(215 8% 58%)" : "hsl(215 8% 72%)") : `hsl(${angle} 68% ${dark.matches ? 62 : 66}%)`;
}

let beads = []; // for every feature: its drawing, cycle, rank in the cycle, and current place on the ring
function drawRings() {
  const box = $("rings");
  box.replaceChildren();
  beads = [];
  const zoom = head.axis.length <= 16 ? 1.9 : head.axis.length <= 32 ? 1.5 : 1.1;
  head.cycles.forEach((cycle, number) => {
    const n = cycle.features.length;
    const radius = n === 1 ? 0 : Math.max(16, n * 22 / (2 * Math.PI));
    const half = radius + 26;
    const svg = element(box, "svg", { viewBox: `${-half} ${-half} ${2 * half} ${2 * half}`, width: 2 * half * zoom });
    if (n > 1) {
      element(svg, "circle", { r: radius, class: "track" });
      element(svg, "line", { x1: 0, x2: 0, y1: -radius - 13, y2: -radius - 22, class: "start" });
      const axis = head.axes === 2 ? ["column", "row"][cycle.axis] : "";
      element(svg, "text", { class: "name", y: axis && radius > 24 ? -6 : 0 }, `${n}`);
      if (axis && radius > 24) element(svg, "text", { class: "name", y: 8 }, axis);
    }
    cycle.features.forEach((feature, rank) => {
      const group = element(svg, "g");
      element(group, "circle", { r: 10, fill: color(number, rank) });
      element(group, "text", {}, feature);
      beads[feature] = { group, cycle: number, rank, n, radius, at: rank };
    });
  });
}

function placeBead(bead, at) {
  const angle = 2 * Math.PI * at / bead.n - Math.PI / 2;
  bead.group.setAttribute("transform", `translate(${bead.radius * Math.cos(angle)} ${bead.radius * Math.sin(angle)})`);
}

// The place of each feature on its ring at the visible position, by the server's answer.
function targets() {
  const at = [];
  head.cycles.forEach((cycle) => {
    const position = cycle.axis === 0 ? shown.x : shown.y;
    cycle.features.forEach((place, rank) => { at[head.places[position][place]] = rank; });
  });
  return at;
}

let frame = null;
function moveBeads(smooth) {
  cancelAnimationFrame(frame);
  const goals = targets();
  const begun = performance.now();
  const ways = beads.map((bead, feature) => {
    let way = goals[feature] - bead.at;
    way -= bead.n * Math.round(way / bead.n); // the shorter way
    return [bead.at, way];
  });
  const step = (now) => {
    const share = smooth ? Math.min(1, (now - begun) / 380) : 1;
    const eased = share * share * (3 - 2 * share);
    beads.forEach((bead, feature) => placeBead(bead, ways[feature][0] + eased * ways[feature][1]));
    if (share < 1) frame = requestAnimationFrame(step);
  };
  beads.forEach((bead, feature) => { bead.at = goals[feature]; });
  step(begun);
}

function drawField() {
  const canvas = $("field"), rows = head.places.length, columns = head.axis.length;
  canvas.width = columns; canvas.height = rows;
  const pen = canvas.getContext("2d");
  const colors = [];
  head.cycles.forEach((cycle, number) => cycle.features.forEach((feature, rank) => { colors[feature] = color(number, rank); }));
  head.places.forEach((places, row) => places.forEach((feature, place) => { pen.fillStyle = colors[feature]; pen.fillRect(place, row, 1, 1); }));
  canvas.setAttribute("aria-label", `${rows} positions of ${columns} features; the head repeats after ${head.order.join(" by ")} positions.`);
}

function drawFacts() {
  const lengths = [0, 1].map((axis) => head.cycles.filter((cycle) => cycle.axis === axis).map((cycle) => cycle.features.length).sort((a, b) => b - a));
  const facts = [["Cycles", lengths.filter((some) => some.length).map((some) => some.join(" ")).join(" | ")], ["Order of the head", head.order.join(" × ")],
    ["All 8 heads repeat after", head.axes === 1 ? `${head.reach[0]} tokens` : `${head.reach[0]} columns × ${head.reach[1]} rows`]];
  if (head.r !== null) facts.push(["r", head.r.toFixed(4)], ["Half-life", head.half_life === null ? "none: weights do not decay" : `${head.half_life.toFixed(1)} ${head.axes === 1 ? "tokens" : "pixels"}`]);
  if (head.r !== null && head.axes === 2) facts.push(["Counts", `along ${ORDERS[head.decay_axis].along}`]);
  $("facts").replaceChildren();
  for (const [name, value] of facts) { item($("facts"), "dt", name); item($("facts"), "dd", value); }
  $("along").textContent = head.r === null || head.axes === 1 ? "" : `This head counts along ${ORDERS[head.decay_axis].along}.`;
  for (const warning of head.warnings) { item($("facts"), "dt", "Note"); item($("facts"), "dd", warning, "warning"); }
}

const LEFT = 44, TOP = 14, BOTTOM = 206;
function drawScores() {
  const svg = $("scores");
  svg.replaceChildren();
  const width = Math.max(300, Math.min(900, svg.clientWidth)), RIGHT = width - 14;
  svg.setAttribute("viewBox", `0 0 ${width} 250`);
  const most = Math.max(1, ...head.permuteformer, ...head.similarity);
  const first = head.distances[0], last = head.distances.at(-1);
  const x = (distance) => LEFT + (RIGHT - LEFT) * (distance - first) / (last - first);
  const y = (score) => BOTTOM - (BOTTOM - TOP) * score / most;
  for (const tick of [0, 0.25, 0.5, 0.75, 1]) {
    element(svg, "line", { x1: LEFT, x2: RIGHT, y1: y(tick), y2: y(tick), class: "axis" });
    element(svg, "text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, tick);
  }
  for (let tick = first; tick <= last; tick += width < 500 ? 16 : 8) element(svg, "text", { x: x(tick), y: BOTTOM + 18, "text-anchor": "middle" }, `${tick}`.replace("-", "−"));
  const name = head.axes === 1 ? "i − j (tokens)" : ORDERS[head.decay_axis].distance;
  element(svg, "text", { x: (LEFT + RIGHT) / 2, y: BOTTOM + 38, "text-anchor": "middle" }, name);
  if (first < 0) {
    element(svg, "text", { x: LEFT, y: BOTTOM + 38 }, "← keys after");
    element(svg, "text", { x: RIGHT, y: BOTTOM + 38, "text-anchor": "end" }, "keys before →");
  }
  head.similarity.forEach((value, n) => element(svg, "circle", { cx: x(head.distances[n]), cy: y(value), r: first < 0 ? 2 : 3, class: "similarity" }));
  const path = (values) => values.map((value, n) => `${n ? "L" : "M"}${x(head.distances[n]).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  element(svg, "path", { d: path(head.performer), class: "theirs" });
  element(svg, "path", { d: path(head.permuteformer), class: "ours" });
  const here = head.decay_axis === 0 ? shown.x : shown.y, index = head.distances.indexOf(here);
  let score = "";
  if (index >= 0) {
    element(svg, "line", { x1: x(here), x2: x(here), y1: TOP, y2: BOTTOM, class: "here" });
    element(svg, "circle", { cx: x(here), cy: y(head.permuteformer[index]), r: 6, class: "dot" });
    score = `At distance ${here} it is ${head.permuteformer[index].toFixed(3)} with PermuteFormer and ${head.performer[index].toFixed(3)} with Performer.`;
  }
  const where = head.axes === 1 ? "" : ` along ${ORDERS[head.decay_axis].along}`;
  $("score-text").textContent = `The score of a query with an equal key at each distance${where}, relative to distance 0. Performer gives all distances the same score. ${score}`;
  svg.setAttribute("aria-label", `Score by distance. ${score}`);
}

function drawMaps() {
  const what = head.axes === 2 ? "Weights that the middle pixel gives to all pixels." : `Attention weights: one row per query, one column per key${head.two_sided ? "" : " up to it"}.`;
  const decay = head.half_life === null ? "" : head.axes === 2 ? `, and decay with the distance counted ${ORDERS[head.decay_axis].counted}` : head.two_sided ? ", and decay on both sides of the diagonal" : ", and decay from the diagonal";
  const unit = head.axes === 2 ? "pixel" : "token";
  const sentence = [
    choice().alike ? `All ${unit}s are equal, so they get equal weights.` : `Weights depend on what a ${unit} is, not on its position.`,
    head.axes === 2 ? `They depend on the columns and rows between two pixels${decay}.` : `They form stripes, because scores depend on i − j only${decay}.`,
  ];
  if (!choice().alike) sentence[1] = `Weights depend on what a ${unit} is and on its position${decay}.`;
  const most = Math.max(...head.map.permuteformer.flat(), ...head.map.performer.flat());
  ["performer", "permuteformer"].forEach((name, n) => {
    $(`${name}-text`).textContent = `${what} ${sentence[n]}`;
    heat($(name), head.map[name], most);
    $(name).setAttribute("aria-label", `Weights of ${name}, ${head.map.rows} by ${head.map.columns}, at most ${Math.max(...head.map[name].flat()).toFixed(3)}. ${sentence[n]}`);
  });
}

function heat(canvas, rows, most) {
  const style = getComputedStyle(document.documentElement);
  const [low, high] = ["--low", "--high"].map((name) => style.getPropertyValue(name).match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16)));
  canvas.width = rows[0].length; canvas.height = rows.length;
  const pen = canvas.getContext("2d");
  rows.forEach((row, y) => row.forEach((value, x) => {
    const share = Math.sqrt(value / most); // makes small weights visible
    pen.fillStyle = `rgb(${low.map((part, n) => Math.round(part + share * (high[n] - part))).join(" ")})`;
    pen.fillRect(x, y, 1, 1);
  }));
}

// ---- moving through positions

function move(smooth = false) {
  shown = { x: Number($("position").value), y: axes() === 1 ? Number($("position").value) : Number($("row").value) };
  $("position-shown").value = shown.x;
  $("row-shown").value = $("row").value;
  if (!head) return;
  moveBeads(smooth && !still.matches);
  const rows = head.places.length;
  const first = head.axis.filter((axis) => axis === 0).length / head.axis.length; // share of the features that axis 0 moves
  [[$("field-row"), shown.x, 0, first], [$("field-column"), shown.y, first, 1 - first]].forEach(([frame, position, left, width]) => {
    Object.assign(frame.style, { top: `calc(${100 * position / rows}% - 2px)`, height: `calc(${100 / rows}% + 4px)`, left: `${100 * left}%`, width: `${100 * width}%` });
    frame.hidden = !width;
  });
  const moved = targets();
  const back = beads.filter((bead, feature) => moved[feature] === bead.rank).length;
  $("back").textContent = `${back} of ${beads.length} features are back in place.`;
  drawScores();
}

let last = { x: 0, y: 0 };
for (const id of ["position", "row"]) $(id).addEventListener("input", () => {
  const near = Math.abs($("position").value - last.x) + Math.abs($("row").value - last.y) === 1;
  last = { x: Number($("position").value), y: Number($("row").value) };
  move(near);
});

function play(on) {
  clearInterval(timer);
  timer = null;
  $("play").textContent = on ? "Pause" : "Play";
  $("play").setAttribute("aria-pressed", String(on));
  if (!on) return;
  let ticks = 0;
  timer = setInterval(() => {
    const slider = axes() === 2 && ticks++ % 2 ? $("row") : $("position");
    slider.value = (Number(slider.value) + 1) % (Number(slider.max) + 1);
    move(true);
  }, STEP);
}
$("play").addEventListener("click", () => play(timer === null));

// ---- a trained model

let run = null, speaking = null;
const LEVELS = { 2: "for2", 1: "for1", "-1": "against1", "-2": "against2" };

function presentModel() {
  $("model").hidden = false;
  $("model").parentElement.prepend($("model")); // with a run, the model comes first
  $("model-title").textContent = `A trained model: ${run.name}`;
  const lm = run.kind === "lm";
  $("model-text").textContent = lm ? "A language model. Type the beginning of a text; the model continues it token by token, from a state of constant size."
    : `Labels for ${run.kind === "match" ? "two texts" : run.image ? "an image" : "a text"}: ${run.labels.join(", ")}.`;
  $("text-label").textContent = lm ? "Beginning of a text" : run.kind === "match" ? "First text" : "Text";
  $("text-control").hidden = run.image;
  $("second-control").hidden = run.kind !== "match";
  $("image-control").hidden = !run.image;
  $("predict").hidden = lm;
  $("generate").hidden = $("speaking").hidden = !lm;
}

async function given() {
  if (!run.image) return { texts: run.kind === "match" ? [$("text").value, $("second").value] : [$("text").value] };
  const file = $("image").files[0];
  if (!file) throw new Error("Choose an image first.");
  if (file.size > 700000) throw new Error("The image must have at most 700,000 bytes.");
  const content = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.split(",")[1]);
    reader.onerror = () => reject(new Error("The image cannot be read."));
    reader.readAsDataURL(file);
  });
  return { image: content };
}

async function busily(sentence, work) {
  const buttons = ["predict", "generate", "explain"].map($);
  for (const button of buttons) button.disabled = true;
  $("working").textContent = sentence;
  tell($("model-problem"), null);
  try { await work(); } catch (error) { tell($("model-problem"), error); } finally {
    for (const button of buttons) button.disabled = false;
    $("working").textContent = "";
  }
}

function drawBars(shares) {
  $("bars").replaceChildren();
  $("bars").hidden = false;
  for (const [name, share] of Object.entries(shares).sort((a, b) => b[1] - a[1]).slice(0, 10)) {
    item($("bars"), "span", name.trim() || JSON.stringify(name), "name");
    item(item($("bars"), "span", "", "bar"), "span").style.width = `${100 * share}%`;
    item($("bars"), "span", `${(100 * share).toFixed(1)} %`, "share");
  }
}

$("question").addEventListener("submit", (event) => event.preventDefault());
$("temperature").addEventListener("input", () => { $("temperature-shown").value = Number($("temperature").value).toFixed(1); });
$("predict").addEventListener("click", () => busily("predicting …", async () => drawBars((await ask("/api/predict", await given())).probabilities)));
$("explain").addEventListener("click", () => busily("computing gradients …", async () => drawAttribution(await ask("/api/explain", await given()))));

const signed = (value, most) => (value >= 0 ? "+" : "") + (most >= 0.02 ? value.toFixed(3) : value.toExponential(1));

function drawAttribution(found) {
  drawBars(found.answers);
  $("attribution").hidden = false;
  $("attribution-text").textContent = found.message;
  const spans = found.parts.flatMap((part) => part.spans.map((span) => ({ ...span, part })));
  const most = Math.max(...spans.map((span) => Math.abs(span.value))) || 1;
  const level = (value) => Math.sign(value) * (Math.abs(value) >= 0.6 * most ? 2 : Math.abs(value) >= 0.2 * most ? 1 : 0);
  const box = $("attributed");
  box.replaceChildren();
  if (found.grid) drawHeat(box, found);
  else for (const part of found.parts) {
    const text = item(box, "p", "", "text");
    for (const span of part.spans) {
      const word = span.text.trimEnd();
      const piece = item(text, "span", word, LEVELS[level(span.value)] ?? "");
      piece.title = signed(span.value, most);
      text.append(found.unit === "bytes" ? span.text.slice(word.length) : " ");
    }
  }
  const table = $("top");
  table.replaceChildren();
  const names = found.grid ? ["patch", "value", "blanked out"] : ["word", "value", "blanked out"];
  const row = item(item(table, "thead"), "tr");
  names.forEach((name, n) => { item(row, "th", name, n ? "number" : "").scope = "col"; });
  const body = item(table, "tbody");
  for (const span of [...spans].sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, 8)) {
    const line = item(body, "tr");
    const first = span.places[0];
    item(line, "td", found.grid ? `row ${Math.floor(first / found.grid[1]) + 1}, column ${first % found.grid[1] + 1}` : span.text.trim() || "(blank)");
    for (const value of [span.value, span.measured]) item(line, "td", value === null ? "" : signed(value, most), "number");
  }
}

function drawHeat(box, found) {
  const images = item(box, "div", "", "images");
  const [height, width] = found.grid, part = found.parts[0];
  const most = Math.max(...part.values.map(Math.abs)) || 1;
  const paint = (label, shade) => {
    const canvas = item(images, "canvas");
    canvas.width = width; canvas.height = height;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", label);
    const pen = canvas.getContext("2d");
    for (let n = 0; n < width * height; n++) { pen.fillStyle = shade(n); pen.fillRect(n % width, Math.floor(n / width), 1, 1); }
  };
  paint("The image", (n) => `rgb(${part.tokens[n]} ${part.tokens[n]} ${part.tokens[n]})`);
  paint("For (orange) and against (blue) the answer", (n) => {
    const share = Math.sqrt(Math.abs(part.values[n]) / most);
    return `color-mix(in srgb, ${part.values[n] > 0 ? "#f59b14" : "#2f86d6"} ${(100 * share).toFixed(0)}%, ${dark.matches ? "#191c21" : "#ffffff"})`;
  });
}

$("generate").addEventListener("click", () => busily("generating …", async () => {
  speaking = new AbortController();
  $("stop").hidden = false;
  const place = $("spoken");
  place.hidden = false;
  place.replaceChildren();
  item(place, "span", $("text").value, "given");
  const text = document.createTextNode("");
  place.append(text);
  const body = { prompt: $("text").value, tokens: Number($("tokens").value), temperature: Number($("temperature").value), seed: Number($("text-seed").value) };
  try {
    const answer = await fetch("/api/generate", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: speaking.signal });
    if (!answer.ok) throw new Error((await answer.json()).error);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const piece = JSON.parse(line);
        if (piece.error) throw new Error(piece.error);
        if (piece.text) text.data += piece.text;
      }
      place.scrollTop = place.scrollHeight;
    }
  } finally {
    speaking = null;
    $("stop").hidden = true;
  }
}));
$("stop").addEventListener("click", () => { speaking?.abort(); $("generate").focus(); });

// ---- begin

refresh();
ask("/api/about").then((about) => {
  $("version").textContent = about.version;
  run = about.run;
  if (run) presentModel();
}).catch((error) => tell($("problem"), error));
