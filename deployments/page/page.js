// Draws what /stats and the controller tell, once a second. Text only ever becomes text: nothing here makes HTML.

const EVERY_MS = 1000;
const SHOWN_S = 180;
const RECENT = 10; // looks: shares are of what happened since the first of them
const LEAST = 20; // answers: the shares of fewer are not shown
const SVG = "http://www.w3.org/2000/svg";
const CONTROLLER = "controller"; // below the route prefix of this application
const DIGIT = 8, INK = 16, CELL = 20;
const byId = (id) => document.getElementById(id);
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

let key = null; // in memory only
let about = null;
let looks = []; // the last counts, the oldest first
let controller = null;
let inVain = 0; // observations when there was no controller: the next request to it waits for a change of this number
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
  const content = await reply.json();
  if (!reply.ok) throw new Error(content.error ?? `${path}: ${reply.status}`);
  return content;
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

const percent = (share, digits = 0) => (share === null ? "–" : `${amount(100 * share, digits)} %`);

const sum = (values) => values.reduce((all, value) => all + value, 0);

// --- Charts

function chart(id, label, series, scale) {
  const place = byId(id);
  const line = (each) => ({ width: 2, points: { show: false }, ...each, stroke: () => style(each.color) });
  const axis = { stroke: () => style("--faint"), grid: { stroke: () => style("--line"), width: 1 } };
  const times = (_, splits) => splits.map((at) => new Date(1000 * at).toLocaleTimeString());
  place.setAttribute("role", "group");
  place.setAttribute("aria-label", label);
  const size = () => ({ width: place.clientWidth || 300, height: 200 });
  const padding = [null, 34, null, null]; // half a time has room at the right
  const options = { ...size(), padding, scales: { y: scale }, axes: [{ ...axis, values: times, space: 110 }, { ...axis, size: 65 }], series: [{}, ...series.map(line)] };
  const made = new uPlot(options, [[], ...series.map(() => [])], place);
  new ResizeObserver(() => made.setSize(size())).observe(place);
  return made;
}

let charts = null;

function makeCharts() {
  const rate = (_, value) => `${amount(value)}/s`;
  const ms = (_, value) => `${amount(value, 1)} ms`;
  const decades = (_, low, high) => [10 ** (Math.ceil(Math.log10(low || 10)) - 1), 10 ** Math.ceil(Math.log10(high || 1000))];
  charts = {
    goodput: chart(
      "goodput",
      "Answers a second in the last minutes",
      [
        { label: "answered", color: "--blue", value: rate },
        { label: "the plan promises", color: "--words", dash: [6, 4], value: () => rate(null, controller?.plan?.promised_per_s) },
      ],
      { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] },
    ),
    latency: chart(
      "latency",
      "Latency in the last minutes",
      [
        { label: "median", color: "--blue", value: ms },
        { label: "p99", color: "--words", value: ms },
        { label: "objective", color: "--grey", dash: [6, 4], value: ms },
      ],
      { distr: 3, range: decades },
    ),
  };
}

function remember(now, rate, stats) {
  const promised = controller?.plan?.promised_per_s ?? null;
  const row = {
    time: now / 1000,
    answered: rate.answered,
    promised: promised !== null && promised < 20 * Math.max(rate.answered, 50) ? promised : null, // or it hides the rest
    p50: rate.answered ? (stats.latency_ms.p50 ?? null) : null,
    p99: rate.answered ? (stats.latency_ms.p99 ?? null) : null,
    slo: about.slo_ms,
  };
  for (const [name, values] of Object.entries(history)) {
    values.push(row[name]);
    if (values.length > SHOWN_S) values.shift();
  }
  charts.goodput.setData([history.time, history.answered, history.promised]);
  charts.latency.setData([history.time, history.p50, history.p99, history.slo]);
  for (const each of Object.values(charts)) {
    if (each.cursor.idx == null) each.setLegend({ idx: history.time.length - 1 });
  }
}

// --- What the counts say

// By the second, since the last look; shares since the first of the recent ones.
function difference(now, stats) {
  const last = looks.at(-1), first = looks[0];
  const since = (look, path) => (look ? Math.max(0, path(stats) - path(look.stats)) : 0);
  const perS = (path) => (last ? (1000 * since(last, path)) / (now - last.now) : 0);
  const exits = Object.keys(stats.exits);
  return {
    answered: perS((each) => sum(Object.values(each.exits))),
    refused: perS((each) => each.requests.refused),
    failed: since(first, (each) => each.requests.failed),
    left: exits.map((block) => since(first, (each) => each.exits[block])),
    fills: stats.splits.map((split) => recentLaunches(split, first?.stats.splits)),
  };
}

function recentLaunches(split, earlier) {
  const same = earlier?.find((each) => each.group === split.group && String(each.blocks) === String(split.blocks));
  const launches = same ? split.launches - same.launches : 0;
  if (launches <= 0) return { launches: 0, fill: null };
  const filled = split.fill * split.launches - same.fill * same.launches;
  return { launches, fill: Math.min(1, Math.max(0, filled / launches)) };
}

function surviving(left) {
  let inside = sum(left);
  const all = inside;
  if (all < LEAST) return null;
  return left.map((count) => {
    const share = inside / all;
    inside -= count;
    return share;
  });
}

function filled(fills) {
  const launches = sum(fills.map((each) => each.launches));
  return launches ? sum(fills.map((each) => each.launches * (each.fill ?? 0))) / launches : null;
}

function showNumbers(stats, rate, survival) {
  const { p50, p99 } = stats.latency_ms;
  const promised = controller?.plan?.promised_per_s;
  const audits = stats.audits, seen = audits.lately ?? audits.agreement;
  const numbers = [
    ["answered", `${amount(rate.answered)}/s`, promised ? `the plan promises ${amount(promised)}/s` : ""],
    ["latency, p99", `${amount(p99, 1)} ms`, `median ${amount(p50, 1)}, objective ${amount(about.slo_ms)} ms`, p99 > about.slo_ms],
    ["batches filled", percent(filled(rate.fills)), `${amount(stats.waiting)} inputs wait${busyDevices(stats)}`],
    ["blocks run", survival ? amount(sum(survival), 1) : "–", `of ${about.blocks}, for an input on average`],
    ["early answers right", seen ? percent(seen.share, 1) : "–", promiseKept(audits), audits.verdict === "broken"],
    ["refused", `${amount(rate.refused)}/s`, `${amount(rate.failed)} failed lately`, rate.refused > 0 || rate.failed > 0],
  ];
  byId("numbers").replaceChildren(
    ...numbers.map(([name, value, beside, bad]) => {
      const pair = element("div", bad ? { class: "bad" } : {});
      pair.append(element("dt", {}, name), element("dd", {}, value), element("dd", { class: "beside" }, beside));
      return pair;
    }),
  );
}

// Replicas that computed nothing lately are not listed.
function busyDevices({ replicas, splits }) {
  const all = sum(Object.values(Object.fromEntries(splits.map((each) => [each.group, each.replicas]))));
  return all && replicas ? `, devices ${percent(Math.min(1, sum(replicas.map((each) => each.busy)) / all))} busy` : "";
}

const promiseKept = (audits) =>
  audits.promised === null ? "nothing is promised" : `promise of ${percent(audits.promised, 2)}: ${audits.verdict}`;

// --- The way through the network

const HIGH = 150, ABOVE = 4, BELOW = 40, TAG = 22;
const nameOf = (number) => String.fromCharCode(65 + (number % 26));

// A column for each block: who reaches it, and of those who leaves after it; below, the parts of the plan.
function showRiver(stats, survival) {
  const place = byId("river");
  const width = place.clientWidth || 300, column = width / about.blocks;
  const lanes = lanesOf(stats.splits);
  const high = ABOVE + HIGH + BELOW + TAG * lanes;
  const picture = drawn("svg", { role: "img", width, height: high, viewBox: `0 0 ${width} ${high}` });
  picture.append(drawn("title", {}, survival ? `Shares that reach each block: ${survival.map((s) => percent(s)).join(", ")}` : "No inputs yet"));
  const y = (share) => ABOVE + HIGH * (1 - share);
  const every = Math.ceil(30 / column); // columns from one with words to the next
  const inWords = (share) => (column * every < 48 ? amount(100 * share) : percent(share));
  for (let block = 0; block < about.blocks; block += 1) {
    const x = column * block, share = survival?.[block] ?? 0, on = survival?.[block + 1] ?? 0;
    const bar = (kind, top, bottom) =>
      drawn("rect", { x: x + 1, y: y(top), width: Math.max(1, column - 2), height: HIGH * (top - bottom), class: kind });
    picture.append(bar("full", on, 0), bar("left", share, on));
    if (block % every) continue;
    const middle = { x: x + column / 2, "text-anchor": "middle" };
    if (survival) picture.append(drawn("text", { ...middle, y: ABOVE + HIGH + 15 }, inWords(share)));
    picture.append(drawn("text", { ...middle, y: ABOVE + HIGH + 32, class: "faint" }, block));
  }
  picture.append(drawn("line", { x1: 0, x2: width, y1: y(0), y2: y(0), class: "axis" }), ...forecast(column, y));
  stats.splits.forEach((split, number) => {
    const [first, end] = split.blocks, top = ABOVE + HIGH + BELOW + TAG * laneOf(stats.splits, number);
    const x = column * first + 1, wide = column * (end - first) - 2;
    picture.append(
      drawn("rect", { x, y: top, width: Math.max(2, wide), height: TAG - 4, rx: 4, class: "tagged" }),
      drawn("text", { x: x + wide / 2, y: top + 14, "text-anchor": "middle", class: "on" }, nameOf(number)),
    );
  });
  place.replaceChildren(picture);
}

// Pipelines stand side by side: a new one begins wherever a split begins at block 0.
const laneOf = (splits, number) => Math.max(0, splits.slice(0, number + 1).filter((each) => !each.blocks[0]).length - 1);
const lanesOf = (splits) => (splits.length ? laneOf(splits, splits.length - 1) + 1 : 0);

function* forecast(column, y) {
  const shares = controller?.forecast;
  byId("forecast").hidden = !shares;
  if (!shares) return;
  const { ramps } = controller.plan; // no input leaves at a closed ramp
  const full = controller.full_share ?? 0; // and none that asks for the whole network at any
  const line = (shares) => shares.reduce(
    (all, share, block) => [...all, block && !ramps.includes(block - 1) ? all[block - 1] : share], [],
  ).map((share, block) => `${column * (block + 0.5)},${y(Math.min(1, share + full * (1 - share)))}`);
  yield drawn("polygon", { points: [...line(shares.high), ...line(shares.low).reverse()].join(" "), class: "band" });
  yield drawn("polyline", { points: line(shares.survival).join(" "), class: "forecast" });
}

const PLACE = 15, ROW = 16, PLACES = 64;

function showSplits(stats, rate, survival) {
  const entered = rate.fills[0]?.fill ?? null;
  byId("splits").replaceChildren(
    ...stats.splits.map((split, number) => {
      const { fill } = rate.fills[number], [first, end] = split.blocks;
      const alone = first && survival && entered !== null ? entered * survival[first] : null;
      const item = element("li"), line = element("p");
      const blocks = end - first > 1 ? `blocks ${first} to ${end - 1}` : `block ${first}`;
      line.append(element("span", { class: "tag" }, nameOf(number)), element("strong", {}, blocks), ...devices(split));
      line.append(element("span", { class: "beside" }, `batches of ${split.batch}, ${amount(split.waiting)} waiting`));
      line.append(element("strong", { class: "share" }, fill === null ? "no launches" : `${percent(fill)} full`));
      item.append(line, launch(split, fill, alone));
      return item;
    }),
  );
}

function devices(split) {
  const kind = split.group.replace(/-\d+$/, "");
  const device = (text) => element("span", { class: "device" }, text);
  if (split.replicas > 4) return [device(`${split.replicas} × ${kind}`)];
  return split.replicas ? Array.from({ length: split.replicas }, () => device(kind)) : [device(`no ${kind} now`)];
}

// The places of a launch; the last filled one may be filled in part.
function launch(split, fill, alone) {
  const places = Math.min(split.batch, PLACES), rows = Math.ceil(places / ROW);
  const size = { width: PLACE * Math.min(places, ROW), height: PLACE * rows };
  const picture = drawn("svg", { role: "img", ...size, viewBox: `0 -1 ${size.width} ${size.height + 2}` });
  picture.append(drawn("title", {}, fill === null ? "No launches lately" : `${percent(fill)} of ${split.batch} places filled`));
  const at = (place) => ({ x: PLACE * (place % ROW), y: PLACE * Math.floor(place / ROW) });
  for (let place = 0; place < places; place += 1) {
    const { x, y } = at(place), square = { x: x + 1, y: y + 1, height: PLACE - 2, rx: 2 };
    const part = Math.min(1, Math.max(0, places * (fill ?? 0) - place));
    picture.append(drawn("rect", { ...square, width: PLACE - 2, class: "empty" }));
    if (part) picture.append(drawn("rect", { ...square, width: (PLACE - 2) * part, class: "full" }));
  }
  if (alone !== null) {
    const { x, y } = at(Math.min(places - 1, Math.floor(places * alone)));
    picture.append(drawn("line", { x1: x + 1, x2: x + 1, y1: y, y2: y + PLACE, class: "alone" }));
  }
  return picture;
}

// --- Agreement against its promise

// The interval of the last ten minutes on a line that ends at 100 %, that since the start below it, the promise across.
function showAgreement(stats) {
  byId("checked").textContent = `${stats.agreement[0].toUpperCase()}${stats.agreement.slice(1)}.`;
  byId("promise").textContent = `Of exits: ${stats.promise}.`;
  const place = byId("agreement"), { agreement: total, lately, promised } = stats.audits, seen = lately ?? total;
  if (!seen) return place.replaceChildren();
  const width = place.clientWidth || 300, high = 74, side = 24, middle = 36;
  const least = Math.max(0, Math.min(seen.low, total.low, promised ?? 1) - 0.02);
  const x = (share) => side + ((share - least) / (1 - least)) * (width - 2 * side);
  const picture = drawn("svg", { role: "img", width, height: high, viewBox: `0 0 ${width} ${high}` });
  const line = (from, to, kind, y = middle) => drawn("line", { x1: x(from), x2: x(to), y1: y, y2: y, class: kind });
  const end = { y: middle + 32, class: "faint" };
  picture.append(
    drawn("title", {}, stats.agreement),
    line(least, 1, "axis"),
    line(total.low, total.high, "total", middle + 11),
    line(seen.low, seen.high, "between"),
    drawn("circle", { cx: x(seen.share), cy: middle, r: 6, class: "full" }),
    drawn("text", { ...end, x: x(least), "text-anchor": "middle" }, percent(least)),
    drawn("text", { ...end, x: x(1), "text-anchor": "end" }, "100 %"),
  );
  if (promised !== null) {
    const at = x(promised), anchor = at > width / 2 ? "end" : "start";
    picture.append(
      drawn("line", { x1: at, x2: at, y1: middle - 14, y2: middle + 14, class: "alone" }),
      drawn("text", { x: at, y: middle - 20, "text-anchor": anchor }, `promise ${percent(promised, 2)}: ${stats.audits.verdict}`),
    );
  }
  place.replaceChildren(picture);
}

// --- The controller

function showController(stats) {
  byId("plan").textContent = stats.plan ?? "No plan: the whole network runs in the front.";
  byId("steer").hidden = !(controller && about.takes === "digits");
  if (!controller) {
    byId("deciding").textContent = "No controller steers this application.";
    byId("events").replaceChildren();
    return;
  }
  const { window, paused, plan } = controller;
  const kept = plan.kept === null ? "" : ` Plans have kept ${percent(plan.kept)} of what they promised.`;
  const next = paused ? "The controller is paused." : `The next decision is in ${amount(window.ends_in_s)} s.`;
  byId("deciding").textContent = next + kept;
  byId("events").replaceChildren(...[...controller.events].reverse().map(decision));
}

// The time, and its day where that is not today.
function when(seconds) {
  const at = new Date(1000 * seconds), today = at.toDateString() === new Date().toDateString();
  return today ? at.toLocaleTimeString() : at.toLocaleString();
}

function decision(event) {
  const item = element("li"), at = new Date(1000 * event.at_s).toISOString();
  const gain = (share) => `${share > 0 ? "+" : ""}${percent(share, 1)}`;
  item.append(element("time", { datetime: at }, when(event.at_s)), " ", element("strong", {}, event.what));
  if (event.gain_promised !== null) item.append(` ${gain(event.gain_promised)} promised`);
  if (event.gain_seen !== null) item.append(`, ${gain(event.gain_seen)} seen`);
  item.append(`: ${event.why}${event.after ? `. Now ${event.after}` : ""}`);
  return item;
}

function sayChange(stats) {
  const last = looks.at(-1)?.stats;
  if (last && last.requests.answered > stats.requests.answered) looks = []; // a front has begun anew
  if (!last || last.plan === stats.plan) return;
  looks = [];
  byId("changed").textContent = `The plan changed at ${new Date().toLocaleTimeString()}.`;
  byId("network").classList.remove("moved");
  requestAnimationFrame(() => byId("network").classList.add("moved"));
}

// --- Every second

async function tick() {
  if (!document.hidden) await look();
  setTimeout(tick, EVERY_MS);
}

async function look() {
  try {
    const stats = await json("stats");
    if (!describes(about, stats)) {
      about = await json("page/about.json");
      begin();
    }
    const now = performance.timeOrigin + performance.now();
    await askController(stats.observations);
    sayChange(stats);
    const rate = difference(now, stats);
    const survival = surviving(rate.left) ?? (stats.survival.length ? stats.survival : null);
    showNumbers(stats, rate, survival);
    showRiver(stats, survival);
    showSplits(stats, rate, survival);
    showAgreement(stats);
    showController(stats);
    if (looks.length) remember(now, rate, stats);
    looks = [...looks, { now, stats }].slice(-RECENT);
    byId("trouble").hidden = true;
  } catch (error) {
    byId("trouble").textContent = `Nothing new: ${error.message}`;
    byId("trouble").hidden = false;
  }
}

// Whether these facts are of the network that has these counts: another may have been deployed meanwhile.
function describes(about, stats) {
  return about?.model === stats.model && about.slo_ms === stats.slo_ms && about.blocks === Object.keys(stats.exits).length;
}

async function askController(observations) {
  if (!controller && observations === inVain) return;
  try {
    const reply = await ask(`${CONTROLLER}/status`);
    controller = reply.ok ? await reply.json() : null;
    if (reply.status === 404) inVain = observations;
  } catch {
    controller = null;
  }
}

byId("force").addEventListener("click", async () => {
  byId("force").disabled = true;
  try {
    await json(`${CONTROLLER}/force`, { method: "POST" });
  } catch (error) {
    byId("deciding").textContent = error.message;
  }
  byId("force").disabled = false;
});

function begin() {
  looks = []; // of another network
  byId("model").textContent = about.model;
  document.title = `isobatch: ${about.model}`;
  if (!charts) makeCharts();
  byId("try").hidden = about.takes === "other";
  byId("draw").hidden = byId("load").hidden = about.takes !== "digits";
  byId("say").hidden = about.takes !== "texts";
  byId("drop").hidden = about.takes !== "pictures";
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
let asking = null, asked = 0;

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
  asking = setTimeout(() => travel(predict([pixels])), 150);
}

// Shows the answer to the latest question only: an answer to an earlier one may come later.
async function travel(answer) {
  const number = (asked += 1);
  const shown = await answer
    .then(({ outputs }) => journey(outputs[0]))
    .catch((error) => element("p", {}, error.message));
  if (number === asked) byId("answer").replaceChildren(shown);
}

// One label, those that the input has, all points, or one below each word where the network labels words.
function answered(output) {
  const line = element("p", { class: "word" });
  const labels = output.labels ?? output.points ?? (output.tokens ? [] : [output]);
  const sure = ({ score }) => (about.scores ? `: ${amount(score, 3)}` : `, ${percent(score, 1)} sure`);
  for (const [place, each] of labels.entries())
    line.append(place ? "; " : "", element("strong", {}, each.name), output.png ? ` ${percent(each.share, 1)}` : sure(each));
  if (output.labels && !labels.length) line.append("None of the labels.");
  for (const each of output.tokens ?? []) {
    const word = element("ruby", {}, each.word);
    word.append(element("rt", {}, `${each.name} ${percent(each.score)}`));
    line.append(word, " ");
  }
  return line;
}

// The map over the picture that was sent.
function mapped(output) {
  const both = element("div", { class: "map" });
  both.append(element("img", { src: seen, alt: "the picture" }));
  both.append(element("img", { src: `data:image/png;base64,${output.png}`, alt: "the label of each pixel, as a colour" }));
  return both;
}

// The points on the picture that was sent.
function marked(output) {
  const both = element("div", { class: "map" }), picture = element("img", { src: seen, alt: "the picture" });
  const points = drawn("svg", { role: "img" });
  points.append(drawn("title", {}, "the points on the picture"));
  picture.addEventListener("load", () => points.setAttribute("viewBox", `0 0 ${picture.naturalWidth} ${picture.naturalHeight}`));
  for (const { name, x, y, score } of output.points) {
    const spot = drawn("circle", { cx: x, cy: y, r: "1.5%", class: "point", "fill-opacity": Math.min(1, Math.max(0, score)) });
    spot.append(drawn("title", {}, `${name}, ${percent(score, 1)} sure`));
    points.append(spot);
  }
  both.append(picture, points);
  return both;
}

function journey(output) {
  const place = element("div");
  const spared = about.blocks - 1 - output.exit_block;
  const whole = spared ? `It left after block ${output.exit_block}; ${spared} more were never run.` : "It went through all blocks.";
  const way = "level" in output ? `${whole} Level ${output.level} of the cascade answered.` : whole;
  place.append(answered(output), element("p", {}, way));
  if (output.png) place.append(mapped(output));
  if (output.points) place.append(marked(output));
  const side = Math.min(36, 320 / about.blocks), width = side * about.blocks;
  const picture = drawn("svg", { width, height: side + 2, viewBox: `0 0 ${width} ${side + 2}`, role: "img" });
  picture.append(drawn("title", {}, way));
  for (let block = 0; block < about.blocks; block += 1) {
    const kind = block < output.exit_block ? "full" : block === output.exit_block ? "left" : "empty";
    picture.append(drawn("rect", { x: side * block + 1, y: 2, width: side - 3, height: side - 3, rx: 3, class: kind }));
  }
  place.append(picture);
  const list = element("ul");
  for (const step of output.splits) {
    const others = step.inputs > 1 ? `in a launch with ${step.inputs - 1} other${step.inputs > 2 ? "s" : ""}` : "alone in its launch";
    const times = `waited ${amount(step.queued_ms, 1)} ms, ran ${amount(step.computed_ms, 1)} ms`;
    list.append(element("li", {}, `from block ${step.block}: ${times}, ${others}`));
  }
  place.append(list);
  return place;
}

const canvas = byId("draw").querySelector("canvas");
canvas.addEventListener("pointerdown", (event) => (canvas.setPointerCapture(event.pointerId), inkAt(event)));
canvas.addEventListener("pointermove", (event) => event.buttons && inkAt(event));
byId("wipe").addEventListener("click", () => {
  pixels = pixels.map((row) => row.map(() => 0));
  showPixels();
  clearTimeout(asking);
  asked += 1;
  byId("answer").replaceChildren();
});
byId("another").addEventListener("click", () => {
  pixels = noisy(oneOf(about.digits));
  showPixels();
  travel(predict([pixels]));
});
byId("say").addEventListener("submit", (event) => {
  event.preventDefault();
  travel(predict([byId("say").querySelector("textarea").value]));
});

let seen = ""; // the picture that was sent, where the answer is shown over it

function askPicture(file) {
  if (!file) return;
  const form = new FormData();
  form.append("file", file);
  if (about.maps) form.append("map", "png");
  const reader = new FileReader();
  reader.addEventListener("load", () => {
    seen = reader.result;
    travel(json("predict", { method: "POST", body: form }));
  });
  reader.readAsDataURL(file);
}
byId("drop").addEventListener("change", (event) => askPicture(event.target.files[0]));
for (const name of ["dragover", "drop"]) {
  byId("try").addEventListener(name, (event) => {
    if (about?.takes !== "pictures") return;
    event.preventDefault();
    askPicture(event.dataTransfer.files[0]);
  });
}

// --- Load from this page

const TURN_MS = 50, AT_ONCE = 6, PAUSE_MS = 1000;
let due = 0, flying = 0, sendAt = 0;

const oneOf = (values) => values[Math.floor(values.length * Math.random())];

function noisy(digit) {
  const noise = Number(byId("noise").value) / 100;
  const gauss = () => Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
  return digit.map((row) => row.map((ink) => Math.min(INK, Math.max(0, ink + INK * noise * gauss()))));
}

function sendLoad() {
  due = Math.min(due + (Number(byId("rate").value) * TURN_MS) / 1000, 64);
  if (!about || due < 1 || flying >= AT_ONCE || performance.now() < sendAt) return;
  const inputs = Array.from({ length: Math.floor(due) }, () => noisy(oneOf(about.digits)));
  due -= inputs.length;
  flying += 1;
  predict(inputs)
    .catch(() => (sendAt = performance.now() + PAUSE_MS)) // a refusal is counted by the server, and shown
    .finally(() => (flying -= 1));
}

for (const [id, unit] of [["rate", ""], ["noise", " %"]]) {
  byId(id).addEventListener("input", () => {
    byId("load").querySelector(`output[for=${id}]`).value = byId(id).value + unit;
  });
}
setInterval(sendLoad, TURN_MS);
tick();
