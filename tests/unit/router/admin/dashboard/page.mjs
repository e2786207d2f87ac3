// The gateway's page in node: `node page.mjs URL KEY [ITS ADDRESS IN THE BROWSER]`. As much of a browser as the page's
// script uses, what somebody does there, and on stdout what is seen after each step, as JSON: {step: [line, ...]}, the
// last line being what is not seen.
const [url, key, href = `${url}/`] = process.argv.slice(2);

// -- as much of a document as the script uses -------------------------------------------------------------------------

class Node {}

class Text extends Node {
  constructor(text) { super(); this.text = text; }
  get seen() { return this.text; }
}

class Element extends Node {
  constructor(tag) {
    super();
    Object.assign(this, { tag, hidden: false, value: "", className: "", children: [], dataset: {}, listeners: {}, attributes: {} });
    this.classList = { add() {}, remove() {} };
  }
  getAttribute(name) { return this.attributes[name] ?? null; }
  setAttribute(name, value) {
    this.attributes[name] = String(value);
    if (name === "hidden") this.hidden = true;
    if (name.startsWith("data-")) this.dataset[name.slice(5).replace(/-(\w)/g, (_, one) => one.toUpperCase())] = String(value);
  }
  append(...nodes) { this.children.push(...nodes.map((one) => (one instanceof Node ? one : new Text(String(one))))); }
  replaceChildren(...nodes) { this.children = []; this.append(...nodes); }
  set textContent(text) { this.replaceChildren(text); }
  get all() { return this.children.flatMap((one) => (one instanceof Element ? [one, ...one.all] : [])); }
  contains(other) { return other === this || this.all.includes(other); }
  querySelectorAll(selector) {
    const [, name] = selector.match(/^\[data-(\w+)\]$/);
    return this.all.filter((one) => name in one.dataset);
  }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  click() { return this.listeners.click(); }
  focus() { page.activeElement = this; if (this === at("key")) settle(); }
  scrollIntoView() { settle(); }
  get seen() {  // what is not hidden: cells side by side, the rest of what stands alone on lines of its own
    if (this.hidden || ["noscript", "style", "script", "title"].includes(this.tag)) return "";
    const inside = this.children.map((one) => one.seen).join("");
    if (["td", "th", "dt", "dd"].includes(this.tag)) return `${inside.trim()} | `;
    return ["span", "strong", "code", "a", "meter", "button"].includes(this.tag) ? inside : `\n${inside}\n`;
  }
}

function parsed(html) {
  const root = new Element("html"), open = [root], ids = new Map();
  for (const [, closes, tag, attributes, text] of html.matchAll(/<(\/?)([a-z]\w*)([^>]*)>|([^<]+)/g)) {
    if (text) { open.at(-1).append(text.replace(/\s+/g, " ")); continue; }
    if (closes) { if (open.length > 1) open.pop(); continue; }
    const made = tag === "html" ? root : new Element(tag);
    for (const [, name, value] of attributes.matchAll(/([\w-]+)(?:="([^"]*)")?/g)) {
      made.setAttribute(name, value ?? "");
      if (name === "id") ids.set(value, made);
    }
    if (made === root) continue;
    open.at(-1).append(made);
    if (!["meta", "link", "input"].includes(tag)) open.push(made);
  }
  return { root, ids };
}

// -- a network that can be slow, a clock that stands, and somebody who looks ------------------------------------------

let settle = () => {}, slow = null, numTimers = 0;
const timers = new Map(), kept = new Map(), told = {};

// Resolves when the page waits again: for its timer, for a key, or for somebody to read.
async function after(step, action) {
  const settled = new Promise((resolve) => { settle = resolve; });
  action();
  await settled;
  note(step);
}

// Does what makes the page ask for some paths: the answers have come, and do not arrive until the result is called.
async function held(paths, action) {
  let release, begin;
  const calls = [], begun = new Promise((resolve) => { begin = resolve; });
  slow = { paths, calls, begin, gate: new Promise((resolve) => { release = resolve; }) };
  action();
  await begun;
  slow = null;
  await Promise.all(calls);
  return async () => { release(); await new Promise(setImmediate); };
}

async function ask(path, options = {}) {
  const mine = slow?.paths.test(path) ? slow : null;
  const coming = (async () => {
    const response = await fetch(new URL(path, url), options), text = await response.text();
    return { ok: response.ok, status: response.status, text: async () => text, json: async () => JSON.parse(text) };
  })();
  mine?.calls.push(coming);
  mine?.begin();
  await mine?.gate;
  return coming;
}

function note(step) {
  const lines = root.seen.split("\n").map((one) => one.trim()).filter(Boolean);
  told[step] = [...lines, `[key: ${kept.get("baton-admin-key") ?? "none"}, looks to come: ${timers.size}]`];
}

const wait = (action) => { timers.set(++numTimers, action); settle(); return numTimers; };
const tick = () => { const [[name, action]] = timers; timers.delete(name); action(); };
const why = (name) => root.querySelectorAll("[data-request]").find((one) => one.dataset.request === name).click();
const type = (text) => { at("key").value = text; at("door").listeners.submit({ preventDefault() {} }); };

const html = await (await fetch(url)).text(), [, script] = html.match(/<script>([^]*)<\/script>/);
const { root, ids } = parsed(html.replace(/<(script|style)>[^]*?<\/\1>|<!.*?>/g, ""));
const at = (id) => ids.get(id) ?? null;
const page = {
  documentElement: root, hidden: false, activeElement: null, listeners: {}, getElementById: at,
  createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag), querySelectorAll: (selector) => root.querySelectorAll(selector), addEventListener(name, listener) { this.listeners[name] = listener; },
};
const browser = {
  document: page, Node, navigator: {}, location: { href }, fetch: ask, setTimeout: wait,
  clearTimeout: (name) => timers.delete(name),
  sessionStorage: { getItem: (name) => kept.get(name) ?? null, setItem: (name, value) => kept.set(name, value), removeItem: (name) => kept.delete(name) },
};

// -- the story --------------------------------------------------------------------------------------------------------

await after("opened", () => new Function(...Object.keys(browser), script)(...Object.values(browser)));
await after("a wrong key", () => type("sk-wrong"));
await after("the key", () => type(key));
await after("why", () => why("ended"));

const press = (key) => page.listeners.keydown({ key });
press("a");
note("another key");
press("Escape");
note("Escape");
told["Escape"].push(`[focus: ${page.activeElement?.dataset.request}]`);
await after("why, once more", () => why("ended"));

let arrive = await held(/./, tick);
page.hidden = true;
page.listeners.visibilitychange();
page.hidden = false;
await after("another tab and back", () => page.listeners.visibilitychange());
await arrive();
note("and the look from before");

arrive = await held(/./, tick);
const refused = after("forgotten", () => at("forget").click());
note("the moment it is forgotten");
await refused;
await arrive();
note("and what had been asked with the key");

arrive = await held(/./, () => type("sk-wrong"));
await after("the key after a wrong one", () => type(key));
await arrive();
note("and the wrong one's refusal");

await after("why one that runs", () => why("running"));
arrive = await held(/running/, tick);
await after("forgotten again", () => at("forget").click());
await arrive();
note("and why it runs");

console.log(JSON.stringify(told));
