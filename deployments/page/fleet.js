// Draws what the arbiter of a fleet answers at status, once a second. Text only ever becomes text: nothing here makes HTML.

const EVERY_MS = 1000;
const byId = (id) => document.getElementById(id);
let key = null; // in memory only

function element(name, text, ...inside) {
  const made = document.createElement(name);
  made.textContent = text;
  made.append(...inside);
  return made;
}

const amount = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });
const held = (devices) => Object.entries(devices).filter(([, count]) => count).map(([kind, count]) => `${count} ${kind}`);

function row([name, each]) {
  const rates = [each.goodput_per_s, each.arrivals_per_s, each.expected_per_s].map(amount);
  const cells = [name, held(each.devices).join(", ") || "none", ...rates, each.state];
  return element("tr", "", ...cells.map((cell) => element("td", cell)));
}

function decision({ at_s, why }) {
  return element("li", "", element("time", new Date(1000 * at_s).toLocaleString()), ` ${why}`);
}

async function look() {
  const reply = await fetch("status", { headers: key ? { "X-API-Key": key } : {}, cache: "no-store" });
  byId("key").hidden = reply.status !== 401;
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error);
  byId("applications").replaceChildren(...Object.entries(answer.applications).map(row));
  byId("decisions").replaceChildren(...answer.decisions.filter(({ budgets }) => budgets).reverse().map(decision));
}

async function tick() {
  const trouble = byId("trouble");
  if (!document.hidden)
    await look().then(() => (trouble.hidden = true), (error) => {
      trouble.textContent = `Nothing new: ${error.message}`;
      trouble.hidden = false;
    });
  setTimeout(tick, EVERY_MS);
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").querySelector("input").value;
});
tick();
