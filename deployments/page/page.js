// Draws what /stats and the controller tell, once a second. Text only ever becomes text: nothing here makes HTML.

const EVERY_MS = 1000;
const SHOWN_S = 180;
const SVG = "http://www.w3.org/2000/svg";
const CONTROLLER = "/controller/status";
const DIGIT = 8, INK = 16, CELL = 20;
const byId = (id) => document.getElementById(id);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let key = null; // in memory only
let about = null;
let before = null; // the last counts
let controller = null;
const history = { time: [], answered: [], promised: [], p50: [], p99: [], slo: [] };

// --- Asking

async function ask(path, options = {}) {
  const headers = { ...(options.headers ?? {}), ...(key ? { "X-API-Key": key } : {}) };
  const reply = await fetch(path, { ...options, headers, cache: "no-store" });
  if (reply.status === 401) {
    byId("key").hidden = false;
    throw new Error("a key is needed");
  }
  return reply;
}

async function json(path, options) {
  const reply = await ask(path, options);
  const told = await reply.json();
  if (!reply.ok) throw new Error(told.error ?? `${path}: ${reply.status}`);
  return told;
}

function predict(inputs) {
  const headers = { "Content-Type": "application/json" };
  return json("predict", { method: "POST", headers, body: JSON.stringify({ inputs }) });
}

// --- Small pieces

function element(name, attributes = {}, text = null, space = null) {
  const made = space ? document.createElementNS(space, name) : document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  if (text !== null) made.textContent = text;
  return made;
}

const drawn = (name, attributes, text = null) => element(name, attributes, text, SVG);

const amount = (value, digits = 0) =>
  value === null || value === undefined || !Number.isFinite(value)
    ? "–"
    : value.toLocaleString("en", { maximumFractionDigits: digits });

const percent = (share) => `${amount(100 * share, 1)} %`;

// --- Charts

function chart(id, series, axes = {}) {
  const place = byId(id);
  const line = (each) => ({ width: 2, points: { show: false }, ...each, stroke: style(each.color) });
  const axis = { stroke: style("--faint"), grid: { stroke: style("--line"), width: 1 } };
  const options = {
    width: place.clientWidth || 300,
    height: 200,
    scales: { x: { time: axes.time ?? true }, y: { range: (_, low, high) => [0, Math.max(high * 1.1, axes.least ?? 1)] } },
    axes: [{ ...axis, ...(axes.x ?? {}) }, { ...axis, size: 60 }],
    series: [axes.first ?? {}, ...series.map(line)],
    bands: axes.bands,
  };
  const made = new uPlot(options, [[], ...series.map(() => [])], place);
  new ResizeObserver(() => made.setSize({ width: place.clientWidth, height: 200 })).observe(place);
  return made;
}

let charts = null;

function makeCharts() {
  const rate = (_, value) => amount(value);
  const ms = (_, value) => amount(value, 1);
  charts = {
    goodput: chart("goodput", [
      { label: "answered", color: "--blue", value: rate },
      { label: "the plan promises", color: "--orange", dash: [6, 4], value: rate },
    ]),
    latency: chart("latency", [
      { label: "p50, ms", color: "--blue", value: ms },
      { label: "p99, ms", color: "--orange", value: ms },
      { label: "SLO, ms", color: "--grey", dash: [6, 4], value: ms },
    ]),
    survival: chart(
      "survival",
      [
        { label: "lately", color: "--blue", value: (_, v) => (v === null ? "–" : percent(v)), points: { show: true } },
        { label: "forecast", color: "--orange", dash: [6, 4], value: (_, v) => (v === null ? "–" : percent(v)) },
        { label: "at least", color: "--grey", width: 1, value: (_, v) => (v === null ? "–" : percent(v)) },
        { label: "at most", color: "--grey", width: 1, value: (_, v) => (v === null ? "–" : percent(v)) },
      ],
      { time: false, first: { label: "block" }, bands: [{ series: [4, 3], fill: "rgba(138, 148, 160, 0.25)" }] },
    ),
  };
}

function remember(now, rate) {
  const promised = controller?.plan?.promised_per_s ?? null;
  const row = {
    time: now / 1000,
    answered: rate.answered,
    promised: promised !== null && promised < 20 * Math.max(rate.answered, 50) ? promised : null,
    p50: rate.answered ? (rate.latency.p50 ?? null) : null,
    p99: rate.answered ? (rate.latency.p99 ?? null) : null,
    slo: about.slo_ms,
  };
  for (const [name, values] of Object.entries(history)) {
    values.push(row[name]);
    if (values.length > SHOWN_S) values.shift();
  }
  charts.goodput.setData([history.time, history.answered, history.promised]);
  charts.latency.setData([history.time, history.p50, history.p99, history.slo]);
}

function showSurvival(left) {
  const blocks = Array.from({ length: about.blocks }, (_, block) => block);
  const forecast = controller?.forecast;
  const empty = blocks.map(() => null);
  charts.survival.setData([
    blocks,
    left ?? empty,
    forecast?.survival ?? controller?.survival ?? empty,
    forecast?.low ?? empty,
    forecast?.high ?? empty,
  ]);
}

// --- What the counts say

function difference(now, stats) {
  const earlier = before?.stats;
  const seconds = before ? (now - before.now) / 1000 : null;
  const since = (path) => (earlier ? Math.max(0, path(stats) - path(earlier)) / seconds : 0);
  const left = Object.keys(stats.exits).map((block) => stats.exits[block] - (earlier?.exits[block] ?? 0));
  return {
    answered: left.reduce((sum, count) => sum + count, 0) / (seconds ?? Infinity),
    refused: since((each) => each.requests.refused),
    latency: stats.latency_ms,
    left,
  };
}

function surviving(left) {
  let inside = left.reduce((sum, count) => sum + count, 0);
  const all = inside;
  if (all < 20) return null; // too few to say
  return left.map((count) => {
    const share = inside / all;
    inside -= count;
    return share;
  });
}

function showNumbers(stats, rate) {
  const told = [
    ["answered", `${amount(rate.answered)}/s`],
    ["p50", `${amount(stats.latency_ms.p50, 1)} ms`],
    ["p99", `${amount(stats.latency_ms.p99, 1)} ms`],
    ["refused", `${amount(rate.refused)}/s`],
    ["failed", amount(stats.requests.failed)],
    ["inside", amount(stats.inside)],
    ["waiting", amount(stats.waiting)],
    ["fronts", amount(stats.fronts.length)],
  ];
  byId("numbers").replaceChildren(
    ...told.map(([name, value]) => {
      const pair = element("div");
      pair.append(element("dt", {}, name), element("dd", {}, value));
      return pair;
    }),
  );
}

const PLACE = 15, PLACES = 32, EDGE = 190;

function showSplits(stats, left) {
  const survival = surviving(left);
  const picture = drawn("svg", { role: "img" });
  picture.append(drawn("title", {}, "The splits of the plan, and how full their launches are"));
  const entered = stats.splits.length ? recentFill(stats.splits[0], before?.stats.splits[0]) : null;
  let top = 0;
  stats.splits.forEach((split, number) => {
    const fill = recentFill(split, before?.stats.splits[number]);
    const places = Math.min(split.batch, PLACES), rows = Math.ceil(places / 16);
    const [first, end] = split.blocks;
    const kind = `${split.replicas} × ${split.group.replace(/-\d+$/, "")}`;
    const place = drawn("g", { transform: `translate(0, ${top})` });
    place.append(
      drawn("text", { x: 0, y: 14 }, `blocks ${first}–${end - 1}`),
      drawn("text", { x: 0, y: 32, class: "faint" }, `${kind}, batch ${split.batch}`),
      drawn("text", { x: 0, y: 48, class: "faint" }, `ramps ${split.ramps.join(", ") || "none"}`),
      ...launch(places, fill, first && survival && entered !== null ? entered * survival[first] : null),
      drawn("text", { x: EDGE + 16 * PLACE + 12, y: 14 }, fill === null ? "no launch" : percent(fill)),
      drawn("text", { x: EDGE + 16 * PLACE + 12, y: 32, class: "faint" }, `${split.waiting} waiting`),
    );
    picture.append(place);
    top += Math.max(60, rows * PLACE + 16);
  });
  picture.setAttribute("viewBox", `0 0 540 ${Math.max(1, top)}`);
  byId("splits").replaceChildren(picture);
}

function recentFill(split, earlier) {
  const same = earlier && earlier.group === split.group && earlier.blocks[0] === split.blocks[0];
  const launches = same ? split.launches - earlier.launches : 0;
  if (launches <= 0) return null;
  return Math.min(1, Math.max(0, (split.fill * split.launches - earlier.fill * earlier.launches) / launches));
}

// The places of a launch; the last filled one may be filled in part.
function* launch(places, fill, alone) {
  const at = (place) => ({ x: EDGE + PLACE * (place % 16), y: PLACE * Math.floor(place / 16) });
  for (let place = 0; place < places; place += 1) {
    const { x, y } = at(place);
    const filled = Math.min(1, Math.max(0, places * (fill ?? 0) - place));
    yield drawn("rect", { x: x + 1, y: y + 1, width: PLACE - 2, height: PLACE - 2, rx: 2, class: "empty" });
    if (filled) {
      yield drawn("rect", { x: x + 1, y: y + 1, width: (PLACE - 2) * filled, height: PLACE - 2, rx: 2, class: "full" });
    }
  }
  if (alone !== null) {
    const { x, y } = at(Math.min(places - 1, Math.floor(places * alone)));
    yield drawn("line", { x1: x, x2: x, y1: y - 1, y2: y + PLACE + 1, class: "alone" });
  }
}

function showController() {
  if (!controller) {
    byId("deciding").textContent = "No controller steers this application.";
    return;
  }
  const { window, paused, plan } = controller;
  const kept = plan.kept === null ? "" : `; ${percent(plan.kept)} of what was promised is kept`;
  byId("deciding").textContent = paused
    ? "The controller is paused."
    : `The next look is in ${amount(window.ends_in_s)} s${kept}.`;
  byId("events").replaceChildren(
    ...[...controller.events].reverse().map((event) => {
      const item = element("li");
      const at = new Date(1000 * event.at_s);
      item.append(element("time", { datetime: at.toISOString() }, at.toLocaleTimeString()));
      const gains = [
        event.gain_promised === null ? "" : `, gain promised ${percent(event.gain_promised)}`,
        event.gain_seen === null ? "" : `, seen ${percent(event.gain_seen)}`,
      ].join("");
      item.append(` ${event.what}: ${event.why}${gains}${event.after ? `; now ${event.after}` : ""}`);
      return item;
    }),
  );
}

// --- Every second

async function tick() {
  try {
    about ??= await json("page/about.json");
    if (!charts) begin();
    const stats = await json("stats");
    const now = performance.timeOrigin + performance.now();
    await askController();
    const rate = difference(now, stats);
    byId("plan").textContent = stats.plan ? `Plan: ${stats.plan}` : "No plan: the whole network runs in the front.";
    byId("promise").textContent = `Exits: ${stats.promise}`;
    showNumbers(stats, rate);
    showSplits(stats, rate.left);
    if (before) {
      remember(now, rate);
      showSurvival(surviving(rate.left) ?? (stats.survival.length ? stats.survival : null));
    }
    showController();
    before = { now, stats };
    byId("trouble").hidden = true;
  } catch (error) {
    byId("trouble").textContent = `Nothing new: ${error.message}`;
    byId("trouble").hidden = false;
  }
  setTimeout(tick, EVERY_MS);
}

async function askController() {
  try {
    const reply = await ask(CONTROLLER);
    controller = reply.ok ? await reply.json() : null;
  } catch {
    controller = null;
  }
}

function begin() {
  byId("model").textContent = about.model;
  document.title = `isobatch: ${about.model}`;
  makeCharts();
  byId("try").hidden = about.takes === "other";
  byId("draw").hidden = byId("load").hidden = about.takes !== "digits";
  byId("say").hidden = about.takes !== "texts";
  if (about.takes === "digits") showPixels();
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = byId("key").querySelector("input");
  key = field.value;
  field.value = "";
  byId("key").hidden = true;
});

// --- Try it

let pixels = Array.from({ length: DIGIT }, () => Array(DIGIT).fill(0));
let asking = null;

function showPixels() {
  const canvas = byId("draw").querySelector("canvas");
  const paint = canvas.getContext("2d");
  pixels.forEach((row, y) =>
    row.forEach((ink, x) => {
      const grey = Math.round(255 * (1 - ink / INK));
      paint.fillStyle = `rgb(${grey}, ${grey}, ${grey})`;
      paint.fillRect(CELL * x, CELL * y, CELL, CELL);
    }),
  );
}

function inkAt(event) {
  const box = event.target.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * DIGIT - 0.5;
  const y = ((event.clientY - box.top) / box.height) * DIGIT - 0.5;
  pixels = pixels.map((row, j) => row.map((ink, i) => Math.min(INK, ink + INK * Math.exp(-2.5 * ((i - x) ** 2 + (j - y) ** 2)))));
  showPixels();
  askSoon();
}

function askSoon() {
  clearTimeout(asking);
  asking = setTimeout(() => travel([pixels]), 150);
}

async function travel(inputs) {
  const place = byId("answer");
  try {
    const { outputs } = await predict(inputs);
    place.replaceChildren(journey(outputs[0]));
  } catch (error) {
    place.replaceChildren(element("p", {}, error.message));
  }
}

function journey(output) {
  const told = element("div");
  const sure = `${output.name}, ${percent(output.score)} sure`;
  told.append(element("p", {}, `${sure}; it left after block ${output.exit_block} of ${about.blocks - 1}.`));
  const side = Math.min(36, 500 / about.blocks), width = side * about.blocks;
  const picture = drawn("svg", { viewBox: `0 0 ${Math.max(width, 200)} ${side + 4}`, role: "img" });
  picture.append(drawn("title", {}, `${sure}; block ${output.exit_block}`));
  for (let block = 0; block < about.blocks; block += 1) {
    const kind = block < output.exit_block ? "full" : block === output.exit_block ? "left" : "empty";
    picture.append(drawn("rect", { x: side * block + 1, y: 2, width: side - 3, height: side - 3, rx: 3, class: kind }));
  }
  told.append(picture);
  const list = element("ul");
  for (const step of output.splits) {
    const others = step.inputs > 1 ? `with ${step.inputs - 1} others` : "alone";
    const times = `waited ${amount(step.queued_ms, 1)} ms, ran ${amount(step.computed_ms, 1)} ms`;
    list.append(element("li", {}, `from block ${step.block}: ${times}, ${others}`));
  }
  told.append(list);
  return told;
}

const canvas = byId("draw").querySelector("canvas");
canvas.addEventListener("pointerdown", (event) => (canvas.setPointerCapture(event.pointerId), inkAt(event)));
canvas.addEventListener("pointermove", (event) => event.buttons && inkAt(event));
byId("wipe").addEventListener("click", () => {
  pixels = pixels.map((row) => row.map(() => 0));
  showPixels();
  byId("answer").replaceChildren();
});
byId("another").addEventListener("click", () => {
  pixels = noisy(oneOf(about.digits));
  showPixels();
  travel([pixels]);
});
byId("say").addEventListener("submit", (event) => {
  event.preventDefault();
  travel([byId("say").querySelector("textarea").value]);
});

// --- Load from this page

const TURN_MS = 50, AT_ONCE = 6;
let due = 0, flying = 0;

const oneOf = (values) => values[Math.floor(values.length * Math.random())];

function noisy(digit) {
  const noise = Number(byId("noise").value) / 100;
  const gauss = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
  return digit.map((row) => row.map((ink) => Math.min(INK, Math.max(0, ink + INK * noise * gauss()))));
}

function sendLoad() {
  due = Math.min(due + (Number(byId("rate").value) * TURN_MS) / 1000, 64);
  if (!about || due < 1 || flying >= AT_ONCE) return;
  const inputs = Array.from({ length: Math.floor(due) }, () => noisy(oneOf(about.digits)));
  due -= inputs.length;
  flying += 1;
  predict(inputs)
    .catch(() => {}) // refusals are counted by the server, and shown
    .finally(() => (flying -= 1));
}

for (const [id, unit] of [["rate", ""], ["noise", " %"]]) {
  byId(id).addEventListener("input", () => {
    byId("load").querySelector(`output[for=${id}]`).value = byId(id).value + unit;
  });
}
setInterval(sendLoad, TURN_MS);
tick();
