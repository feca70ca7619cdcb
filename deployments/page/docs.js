// Makes the OpenAPI document of this server readable. Text only ever becomes text: nothing here makes HTML.

const byId = (id) => document.getElementById(id);
let key = null; // in memory only

function element(name, text = null, ...inside) {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  made.append(...inside);
  return made;
}

function link(text, to) {
  const made = element("a", text);
  made.href = to;
  return made;
}

const headers = () => (key ? { "X-API-Key": key } : {});

// --- Shapes

const nameOf = (reference) => reference.split("/").pop();

/** A schema in a few words, with links to the schemas that it names. */
function shape(schema) {
  const words = element("span");
  if (!schema || !Object.keys(schema).length) words.append("anything");
  else if (schema.$ref) words.append(link(nameOf(schema.$ref), `#${nameOf(schema.$ref)}`));
  else if (schema.anyOf) schema.anyOf.forEach((each, place) => words.append(place ? " or " : "", shape(each)));
  else if (schema.const !== undefined) words.append(JSON.stringify(schema.const));
  else if (schema.enum) words.append(schema.enum.map((each) => JSON.stringify(each)).join(" or "));
  else if (schema.prefixItems) words.append(`list of ${schema.prefixItems.length}`);
  else if (schema.type === "array") words.append("list of ", shape(schema.items));
  else if (schema.additionalProperties?.type || schema.additionalProperties?.$ref)
    words.append("by name: ", shape(schema.additionalProperties));
  else words.append(schema.format ?? schema.type ?? "anything");
  return words;
}

function row(name, ...cells) {
  const heading = element("th", name);
  heading.scope = "row";
  return element("tr", null, heading, ...cells.map((cell) => element("td", null, cell)));
}

const table = (rows) => element("table", null, element("tbody", null, ...rows));

function fields(schema) {
  const needed = new Set(schema.required ?? []);
  return table(
    Object.entries(schema.properties ?? {}).map(([name, each]) =>
      row(name, element("span", null, shape(each), needed.has(name) ? "" : ", may be absent"), each.description ?? ""),
    ),
  );
}

// --- Paths

const jsonOf = (content) => content?.["application/json"];

function asCurl(path, method, body) {
  const url = decodeURI(new URL(path.replace(/^\//, ""), location.href)); // with the places of a path in braces
  const shown = key ? " -H 'X-API-Key: KEY'" : "";
  return `curl ${method === "post" ? "-X POST " : ""}${url}${shown}${body ? ` -d '${JSON.stringify(body)}'` : ""}`;
}

function sender(path, method, examples) {
  const place = element("div");
  const answer = element("pre");
  answer.hidden = true;
  answer.tabIndex = 0;
  answer.setAttribute("aria-label", "The answer");
  const send = async (body) => {
    const options = { method: method.toUpperCase(), headers: headers() };
    if (body) Object.assign(options, { body: JSON.stringify(body), headers: { ...headers(), "Content-Type": "application/json" } });
    answer.hidden = false;
    try {
      const reply = await fetch(path.replace(/^\//, ""), options);
      const text = await reply.text();
      let shown = text;
      try { shown = JSON.stringify(JSON.parse(text), null, 1); } catch { /* no JSON */ }
      answer.textContent = `${reply.status}\n${shown}`;
    } catch (error) {
      answer.textContent = String(error);
    }
  };
  for (const [name, body] of examples) {
    const button = element("button", name ? `Send ${name}` : "Ask");
    button.type = "button";
    button.addEventListener("click", () => send(body));
    const line = element("pre", asCurl(path, method, body));
    line.tabIndex = 0;
    line.setAttribute("aria-label", "The same on a command line");
    place.append(line, ...(path.includes("{") ? [] : [button])); // what stands in its places is not known
  }
  place.append(answer);
  return place;
}

function operation(path, method, about) {
  const place = element("article", null, element("h3", null, element("b", method.toUpperCase()), ` ${path}`));
  place.append(element("p", about.description ?? about.summary ?? ""));
  const parameters = (about.parameters ?? []).map((each) =>
    row(each.name, element("span", null, shape(each.schema), ` (${each.in})`), each.description ?? ""),
  );
  if (parameters.length) place.append(table(parameters));
  const body = jsonOf(about.requestBody?.content);
  if (body) place.append(element("details", null, element("summary", "The body"), body.schema.$ref ? shape(body.schema) : fields(body.schema)));
  const statuses = Object.entries(about.responses).map(([status, each]) =>
    row(status, jsonOf(each.content) ? shape(jsonOf(each.content).schema) : "no body", each.description),
  );
  place.append(element("details", null, element("summary", "What may come back"), table(statuses)));
  const examples = Object.entries(body?.examples ?? {}).map(([name, each]) => [name, each.value]);
  if (!about.requestBody && method === "get" && !path.includes("{")) examples.push([null, null]);
  if (examples.length) place.append(sender(path, method, examples));
  return place;
}

function draw(api) {
  byId("title").textContent = api.info.title;
  byId("about").textContent = api.info.description ?? "";
  byId("paths").replaceChildren(
    ...Object.entries(api.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, about]) => operation(path, method, about)),
    ),
  );
  byId("shapes").replaceChildren(
    ...Object.entries(api.components?.schemas ?? {}).map(([name, schema]) => {
      const place = element("article", null, element("h3", name), element("p", schema.description ?? ""), fields(schema));
      place.id = name;
      return place;
    }),
  );
}

async function load() {
  const reply = await fetch("openapi.json", { headers: headers(), cache: "no-store" });
  byId("key").hidden = reply.status !== 401;
  byId("trouble").hidden = reply.ok || reply.status === 401;
  if (reply.ok) draw(await reply.json());
  else byId("trouble").textContent = `openapi.json: ${reply.status}`;
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").querySelector("input").value;
  load();
});
load();
