// The viewer's frame: the grid of samples, the page of a sample, the keyboard, and the URL, which has the whole state.
//
// The state is the query of the URL: `part` a partition, or `@` and the digest of a version, `offset` the first sample of
// a page, `q` and `start` a search, `n` a sample, `back` the query of the page that it returns to, `page` one of the
// exploring pages. Texts only ever become text nodes.

import { showsText } from "./item_parts.js";

const LIMIT = 50;
const PARTITIONS = 200;
const CACHED = 60;
const ORDER = ["unreadable", "video", "document", "image", "images", "page", "depth", "audio", "midi", "text", "tokens", "series", "array"];
const WIDE = new Set(["video", "document", "page", "images", "midi"]); // kinds that use two columns where there are two

// --- small tools --------------------------------------------------------------------------------------------------

/** An element with properties, attributes and children; strings become text nodes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  const shown = children.flat().filter((child) => child !== null && child !== undefined && child !== false);
  if (showsText(tag, shown) && !element.hasAttribute("dir")) element.setAttribute("dir", "auto");
  element.append(...shown);
  return element;
}

const count = (number) => Number(number).toLocaleString("en-US");
/** Bytes for people, as the server writes them. */
export function bytes(size) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  for (; size >= 999.5 && at < units.length - 1; at += 1) size /= 1000;
  return `${at === 0 ? size : Number(size.toPrecision(3))} ${units[at]}`;
}

const state = () => Object.fromEntries(new URLSearchParams(location.search));

/** The URL of a state; empty values are left out. */
export function link(parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== undefined && value !== null && value !== "" && !(name === "offset" && Number(value) === 0)) query.set(name, value);
  }
  const text = query.toString();
  return text ? `?${text}` : "./";
}

const queryOf = (parameters) => link(parameters).replace(/^(\.\/|\?)/, "");

/** Goes to a state. */
export function go(parameters, { replace = false } = {}) {
  const target = link(parameters);
  history[replace ? "replaceState" : "pushState"]({}, "", target);
  return render();
}

class Refused extends Error {}

async function answerOf(response) {
  if (response.ok) return response.json();
  let said = `${response.status} ${response.statusText}`;
  try {
    const found = await response.json();
    said = found.detail || found.error || said;
  } catch { /* not JSON: the status says all there is */ }
  throw new Refused(said);
}

/** What pages ask the server by. */
export const api = {
  /** The JSON of a route; rejects with an error whose message is for people. */
  async get(path, parameters = {}, { signal } = {}) {
    const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== ""));
    const text = query.toString();
    return answerOf(await fetch(text ? `${path}?${text}` : path, { signal, headers: { accept: "application/json" } }));
  },
  async post(path, body, { signal } = {}) {
    const headers = { "content-type": "application/json", accept: "application/json" };
    return answerOf(await fetch(path, { method: "POST", body: JSON.stringify(body), signal, headers }));
  },
  go,
  link,
  h,
  cached,
  card,
  gridKeys,
  itemSections,
  about: () => about,
};

const pages = new Map(); // answers of pages and samples, so that going back is immediate

/** Like `api.get`, once; `fresh` asks again. */
async function cached(path, parameters, signal, { fresh = false } = {}) {
  const key = `${path}?${new URLSearchParams(parameters)}`;
  if (pages.has(key) && !fresh) return pages.get(key);
  const found = await api.get(path, parameters, { signal });
  pages.set(key, found);
  if (pages.size > CACHED) pages.delete(pages.keys().next().value);
  return found;
}

const said = (text) => { document.getElementById("said").textContent = text; };
const inText = (target) => target.closest?.("input, textarea, select, [contenteditable], dialog") !== null;
// Elements that use the arrow keys themselves.
const usesArrows = (target) => inText(target) || target.closest?.("video, audio, [role=slider], [role=application], [data-keys]") !== null;

// --- frame --------------------------------------------------------------------------------------------------------

let about = null;
let itemsModule = null;
let exploreModule = null;

function styleSheet(name) {
  document.head.append(h("link", { rel: "stylesheet", href: `static/${name}` }));
}

async function loadModules(names) {
  if (names.includes("items.js") && itemsModule === null) {
    styleSheet("items.css");
    itemsModule = await import("./items.js");
  }
  if (names.includes("explore.js") && exploreModule === null) {
    styleSheet("explore.css");
    exploreModule = await import("./explore.js");
  }
}

function themeButton() {
  const names = ["", "dark", "light"];
  const shown = { "": "Colours: as the system", dark: "Colours: dark", light: "Colours: light" };
  const stored = () => { try { return localStorage.getItem("theme") ?? ""; } catch { return ""; } };
  const button = h("button", { type: "button", id: "theme" }, "◐");
  const apply = (theme) => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.setAttribute("aria-label", shown[theme] ?? shown[""]);
    button.title = shown[theme] ?? shown[""];
  };
  button.addEventListener("click", () => {
    const next = names[(names.indexOf(stored()) + 1) % names.length];
    try { localStorage.setItem("theme", next); } catch { /* private windows have none */ }
    apply(next);
  });
  apply(stored());
  return button;
}

function helpDialog() {
  const keys = [
    ["← → ↑ ↓", "move between samples"],
    ["Enter", "open the sample"],
    ["Esc", "back to the samples, or to the page before"],
    ["/", "search: a part of an id, or # and a number"],
    ["Shift+PgDn Shift+PgUp", "page after, page before"],
    ["?", "this help"],
  ];
  const rows = keys.flatMap(([key, meaning]) => [h("dt", {}, ...key.split(" ").flatMap((one) => [h("kbd", {}, one), " "])), h("dd", {}, meaning)]);
  const dialog = h("dialog", { id: "help", "aria-labelledby": "help-title" },
    h("h2", { id: "help-title" }, "Keyboard"), h("dl", { class: "keys" }, ...rows),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  document.body.append(dialog);
  return dialog;
}

function frame() {
  const top = document.getElementById("top");
  const field = h("input", { type: "search", id: "search", name: "q", autocomplete: "off", spellcheck: "false", maxlength: "1024", placeholder: "Search ids, or #number", "aria-label": "Search ids, or # and a number" });
  const search = h("form", { role: "search", onsubmit: (event) => { event.preventDefault(); find(field.value.trim()); } },
    field, h("button", { "aria-label": "Search" }, "⌕"));
  top.replaceChildren(
    h("a", { id: "above", class: "button", href: "../", hidden: true }, "← Datasets"),
    h("div", { class: "title" }, h("h1", { id: "title" }, "mm-assets view"), h("p", { id: "subtitle", dir: "auto" })),
    h("nav", { id: "nav", "aria-label": "Pages" }),
    search,
    themeButton(),
    h("button", { type: "button", "aria-label": "Help on the keyboard", title: "Keyboard (?)", onclick: () => help() }, "?"),
  );
}

function help() {
  const dialog = document.getElementById("help") ?? helpDialog();
  if (!dialog.open) dialog.showModal();
}

function find(text) {
  const { part } = state();
  const number = /^#\s*(\d{1,15})$/.exec(text);
  if (number) return go({ part, n: Number(number[1]) });
  return go(text ? { part, q: text } : { part });
}

function showFrame(now) {
  const [, folder, name] = /^(.*\/)?([^/]*)\/?$/.exec(about.title) ?? [null, "", about.title];
  const facts = [about.kind, about.count === null ? null : `${count(about.count)} ${about.count === 1 ? "sample" : "samples"}`, folder || null];
  document.getElementById("above").hidden = !about.is_listed;
  document.getElementById("title").textContent = name || about.title;
  document.getElementById("title").title = about.title;
  document.getElementById("subtitle").textContent = facts.filter(Boolean).join(" · ");
  const explore = Object.entries(exploreModule?.pages ?? {}).map(([name, page]) => [name, page.title]);
  const links = [["", "Samples"], ...(about.has_partitions && !explore.some(([name]) => name === "partitions") ? [["partitions", "Partitions"]] : []), ...explore];
  const current = now.page ?? "";
  document.getElementById("nav").replaceChildren(...(links.length < 2 ? [] : links.map(([name, title]) =>
    h("a", { href: link({ part: now.part, page: name }), "aria-current": name === current ? "page" : undefined }, title))));
  const field = document.getElementById("search");
  if (document.activeElement !== field) field.value = now.q ?? "";
}

// --- pages --------------------------------------------------------------------------------------------------------

/** An id in two parts, of which the first is shortened where there is no room: ids often differ in their ends alone. */
function idParts(id) {
  if (!/^[ -~]{12,}$/.test(id)) return [id];
  const part = (text) => h("span", { "aria-hidden": "true" }, text);
  return [part(id.slice(0, -6)), part(id.slice(-6)), h("span", { class: "out-of-sight" }, id)]; // read out in one
}

/** A card of the grid; `back` is the query of the page that its sample returns to, where that is not the grid. */
export function card(entry, part = state().part, back = undefined) {
  const picture = entry.picture
    ? h("img", { src: entry.picture, alt: "", loading: "lazy", decoding: "async", draggable: "false",
      onerror: (event) => event.target.replaceWith(entry.text ? h("p", {}, entry.text) : h("span", {}, "no picture")) })
    : entry.text ? h("p", {}, entry.text) : h("span", {}, entry.names.join(", ") || "empty");
  return h("li", {}, h("a", { class: "card", href: link({ part, n: entry.index, back }), "data-index": entry.index },
    h("div", { class: "thumb" }, picture),
    h("div", { class: "words" },
      h("span", { class: "id", title: entry.id }, ...idParts(entry.id)),
      entry.note ? h("span", { class: "text warning", title: entry.note }, entry.note)
        : entry.picture && entry.text ? h("span", { class: "text" }, entry.text) : null,
      h("span", { class: "names" }, entry.names.join(" · ")))));
}

/** Moves the focus between the cards of a grid by the arrow keys; true where a key was used. */
export function gridKeys(event, root) {
  const cards = [...root.querySelectorAll(".card")];
  if (!cards.length || event.altKey || event.ctrlKey || event.metaKey) return false;
  const at = cards.indexOf(document.activeElement);
  const columns = cards.filter((one) => one.offsetTop === cards[0].offsetTop).length;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
  if (step === undefined) return false;
  const next = at < 0 ? 0 : at + step;
  if (next < 0 || next >= cards.length) return false;
  cards[next].focus();
  cards[next].scrollIntoView({ block: "nearest" });
  event.preventDefault();
  return true;
}

let paging = { previous: null, next: null }; // the links of the page that is shown

function pageLink(title, target, rel) {
  return h("a", { class: "button", rel, ...(target ? { href: target } : { "aria-disabled": "true" }) }, title);
}

/** Which stage of a partition is shown, where there are several. */
function stageChoice(now) {
  if (!(about.stages?.length > 1)) return null;
  return h("select", { "aria-label": "Stage", onchange: (event) => go({ part: `${about.partition}/${event.target.value}` }) },
    ...about.stages.map((stage) => h("option", { value: stage, selected: stage === about.stage }, stage)));
}

async function showGrid(root, now, signal) {
  const offset = Number(now.offset ?? 0) || 0;
  const found = now.q ? await foundPage(now, signal)
    : await cached("api/samples", { offset, limit: LIMIT, ...(now.part ? { part: now.part } : {}) }, signal);
  if (typeof found.total === "number" && about.count === null) about.count = found.total;
  const last = found.entries.length ? found.entries[found.entries.length - 1].index + 1 : offset;
  let shown;
  if (now.q) {
    shown = found.entries.length ? `${count(found.entries.length)} ${found.entries.length === 1 ? "sample" : "samples"} whose id has “${now.q}”` : `No id has “${now.q}”`;
    if (found.next !== null) shown += ` among the first ${count(found.next)}`;
    paging = { previous: now.start ? "back" : null, next: found.next === null ? null : link({ ...now, start: found.next }) };
  } else {
    shown = found.entries.length ? `#${count(offset)} to #${count(last - 1)}${found.total === null ? "" : ` of ${count(found.total)}`}` : "No samples here";
    paging = {
      previous: offset > 0 ? link({ ...now, offset: Math.max(offset - LIMIT, 0) }) : null,
      next: found.next === null ? null : link({ ...now, offset: found.next }),
    };
  }
  const bar = h("div", { class: "bar" }, h("span", { class: "grow muted" }, shown), stageChoice(now), ...(now.q ? [h("a", { class: "button", href: link({ part: now.part }), "data-back": true }, "All samples")] : exploreModule?.sortControl(api, now) ?? []),
    pageLink("← Previous", paging.previous === "back" ? null : paging.previous, "prev"), pageLink("Next →", paging.next, "next"));
  root.replaceChildren(bar, ...(found.note ? [h("p", { class: "note" }, found.note)] : []),
    h("ol", { class: "grid", "aria-label": "Samples" }, ...found.entries.map((entry) => card(entry, now.part, now.q ? queryOf(now) : undefined))));
  said(shown);
}

const foundPage = (now, signal) => cached("api/find", { q: now.q, start: now.start ?? 0, limit: LIMIT, ...(now.part ? { part: now.part } : {}) }, signal);

/** What a state of the page "Filter" or of a search lists: `entries`, and the states of the pages before and after it. */
async function listed(state, signal) {
  if (state.page === "filter") return exploreModule.filterPage(api, state, { signal });
  const found = await foundPage(state, signal);
  return { entries: found.entries, before: null, after: found.next === null ? null : { ...state, start: found.next } };
}

/** The links to the samples before and after one in the list that it was opened from; null where it is in none. */
async function neighbours(now, index, list, signal) {
  const page = await listed(list, signal);
  const at = page.entries?.findIndex((one) => one.index === index && (one.part ?? now.part ?? "") === (now.part ?? "")) ?? -1;
  if (at < 0) return null;
  const isPacked = (one) => one.index >= 0;
  const step = async (rest, state, choose) => {
    let found = choose(rest.filter(isPacked));
    const onPage = found !== undefined;
    if (!onPage && state) found = choose((await listed(state, signal)).entries.filter(isPacked));
    return found ? link({ part: found.part ?? now.part, n: found.index, back: queryOf(onPage ? list : state) }) : null;
  };
  return {
    previous: await step(page.entries.slice(0, at), page.before, (all) => all[all.length - 1]),
    next: await step(page.entries.slice(at + 1), page.after, (all) => all[0]),
  };
}

function facts(item) {
  const rows = Object.entries(item.facts);
  return rows.length ? h("dl", { class: "facts" }, ...rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))) : null;
}

function plainBody(item) {
  const media = item.media.find((one) => one.content_type.startsWith("image/"));
  if (media) return h("img", { src: media.url, alt: item.name });
  if (typeof item.data.text === "string") return h("pre", { class: "plain" }, item.data.text);
  return h("pre", { class: "plain" }, JSON.stringify(item.data, null, 1));
}

function body(item, context) {
  if (itemsModule === null) return plainBody(item);
  try {
    return itemsModule.renderItem(item, context);
  } catch (error) { // one item that cannot be drawn must not hide the others
    console.warn(`${item.name}: ${error}`);
    return h("div", {}, h("p", { class: "note bad" }, `This cannot be drawn: ${error.message}`), plainBody(item));
  }
}

/** The sections of a sample's items, in the order in which they are shown; `draw` draws them once they are placed. */
function itemSections(items, prefix = "item") {
  const elements = new Map();
  const context = { items, clock: new EventTarget(), mount: (name) => elements.get(name) ?? null };
  // A document without pictures is text: it does not take the place of what is seen or heard.
  const isText = (item) => item.data.blocks.every((block) => block.kind === "text") && !items.some((one) => one.kind === "images" && one.data.over === item.name);
  const kindOf = (item) => (item.kind === "document" && isText(item) ? "text" : item.kind);
  const rank = (item) => (ORDER.indexOf(kindOf(item)) + ORDER.length + 1) % (ORDER.length + 1);
  const shown = items.filter((item) => item.kind !== "absent").toSorted((a, b) => rank(a) - rank(b));
  const sections = shown.map((item, place) => {
    const holder = h("div", { class: "body" });
    elements.set(item.name, holder);
    return h("section", { class: `item ${item.kind}${WIDE.has(kindOf(item)) ? " wide" : ""}`, "aria-labelledby": `${prefix}-${place}`, "data-kind": item.kind, "data-name": item.name },
      h("header", {}, h("h2", { id: `${prefix}-${place}` }, item.name), item.kind === item.name ? null : h("span", { class: "kind" }, item.kind)),
      facts(item), item.note ? h("p", { class: `note${item.kind === "unreadable" ? " bad" : ""}` }, item.note) : null, holder);
  });
  return { sections, draw: () => shown.forEach((item) => elements.get(item.name).append(body(item, context))) };
}

async function showSample(root, now, signal) {
  const index = Number(now.n);
  const found = await cached(`api/sample/${index}`, now.part ? { part: now.part } : {}, signal);
  const { sections, draw } = itemSections(found.items);
  const absent = found.items.filter((item) => item.kind === "absent").map((item) => item.name);
  const list = Object.fromEntries(new URLSearchParams(now.back));
  const isListed = Boolean(list.q) || list.page === "filter";
  const back = link(now.back ? list : { part: now.part, offset: Math.floor(index / LIMIT) * LIMIT });
  const isLast = found.count !== null && index + 1 >= found.count;
  const ownOrder = { previous: index > 0 ? link({ ...now, n: index - 1 }) : null, next: isLast ? null : link({ ...now, n: index + 1 }) };
  const number = h("span", { class: "muted" });
  const turns = h("span", { class: "turns" });
  const showTurns = (links, words) => {
    paging = { ...links, back };
    number.textContent = `#${count(index)}${words}`;
    turns.replaceChildren(pageLink("← Previous", links.previous, "prev"), pageLink("Next →", links.next, "next"));
  };
  if (isListed) showTurns({ previous: null, next: null }, ", in the list's order");
  else showTurns(ownOrder, "");
  const origin = h("div", { id: "origin" });
  root.replaceChildren(
    h("div", { class: "bar" }, h("a", { class: "button", href: back }, now.back && !isListed ? "↑ Back" : "↑ Samples"),
      h("h2", { class: "grow" }, found.id), number, turns),
    h("div", { class: "sample" }, ...sections),
    absent.length ? h("p", { class: "muted absent" }, `Not in this sample: ${absent.join(", ")}`) : "", origin);
  if (isListed) { // the sample does not wait for a list that has to be rebuilt
    neighbours(now, index, list, signal).then((links) => {
      if (signal.aborted) return;
      if (links) showTurns(links, ", in the list's order");
      else showTurns(ownOrder, "");
    }, (error) => { if (!signal.aborted) number.textContent = `#${count(index)}; its list: ${error.message}`; });
  }
  draw();
  exploreModule?.samplePanel?.(origin, api, { ...now, id: found.id, index });
  document.title = `${found.id} · ${about.title}`;
  said(`sample ${found.id}`);
}

async function showPartitions(root, now, signal) {
  const offset = Number(now.offset ?? 0) || 0;
  const found = await api.get("api/partitions", { offset, limit: PARTITIONS }, { signal });
  const names = [...new Set(found.partitions.flatMap((one) => Object.keys(one)))].filter((name) => name !== "key");
  const cell = (name, value) => (typeof value === "number"
    ? h("td", { class: "number", title: count(value) }, name === "bytes" ? bytes(value) : count(value)) : h("td", {}, String(value ?? "")));
  paging = {
    previous: offset > 0 ? link({ ...now, offset: Math.max(offset - PARTITIONS, 0) }) : null,
    next: offset + PARTITIONS < found.total ? link({ ...now, offset: offset + PARTITIONS }) : null,
  };
  const shown = `${count(found.total)} ${found.total === 1 ? "partition" : "partitions"}`;
  root.replaceChildren(
    h("div", { class: "bar" }, h("span", { class: "grow muted" }, shown), pageLink("← Previous", paging.previous, "prev"), pageLink("Next →", paging.next, "next")),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Partitions" }, h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "partition"), ...names.map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, ...found.partitions.map((one) => h("tr", {},
        h("td", {}, h("a", { href: link({ part: one.key }) }, one.key)), ...names.map((name) => cell(name, one[name]))))))));
  said(shown);
}

// --- newer versions -----------------------------------------------------------------------------------------------

const WATCH = 15000; // milliseconds between looks for a newer version
let watched = 0;

/** Says that a newer version was published: what is looked at stays, and the layout does too. */
async function watch() {
  if (!about?.has_versions || document.hidden || Date.now() - watched < WATCH) return;
  watched = Date.now();
  const { part } = state();
  let found;
  try { found = await api.get("api/newest", { part }); } catch { return; /* the next look may have an answer */ }
  if (state().part !== part) return;
  document.getElementById("newer")?.remove();
  if (found.part === null) return;
  document.body.append(h("aside", { id: "newer", role: "status" }, h("span", {}, "A newer version was published."),
    h("a", { class: "button", href: link({ part: found.part }), onclick: () => document.getElementById("newer").remove() }, "Show the newest")));
}

setInterval(watch, WATCH);
document.addEventListener("visibilitychange", watch);

let running = new AbortController();

async function render() {
  running.abort();
  const mine = running = new AbortController();
  const now = state();
  const root = document.getElementById("main");
  try {
    if (about === null || about.part !== (now.part ?? "")) {
      about = await api.get("api/about", now.part ? { part: now.part } : {}, { signal: mine.signal });
      await loadModules(about.modules);
    }
    if (mine.signal.aborted) return;
    showFrame(now);
    document.title = about.title;
    const staged = h("div", {});
    paging = { previous: null, next: null };
    if (now.n !== undefined && now.n !== "") await showSample(staged, now, mine.signal);
    else if (now.page && exploreModule !== null && Object.hasOwn(exploreModule.pages, now.page)) {
      staged.append(h("p", { class: "muted" }, "Reading the dataset…"));
      root.replaceChildren(staged); // it may show parts of itself while it waits for others
      await exploreModule.pages[now.page].render(staged, api, now);
    } else if (now.page === "partitions") await showPartitions(staged, now, mine.signal);
    else if (about.has_manifest === false && !now.part) await showPartitions(staged, now, mine.signal);
    else await showGrid(staged, now, mine.signal);
    if (mine.signal.aborted) return;
    if (staged.parentNode !== root) root.replaceChildren(staged);
    showFrame(now);
    watch();
  } catch (error) {
    if (mine.signal.aborted) return;
    if (!(error instanceof Refused)) console.warn(error);
    const text = error instanceof Refused ? error.message : `The viewer does not answer (${error.message}). Is its command still running?`;
    root.replaceChildren(h("p", { class: "note bad", role: "alert" }, text), h("a", { class: "button", href: link({ part: now.part }) }, "To the samples"));
    if (about === null) document.getElementById("subtitle").textContent = "";
  }
}

// --- events -------------------------------------------------------------------------------------------------------

document.addEventListener("click", (event) => {
  const anchor = event.target.closest?.("a[href]");
  if (!anchor || event.defaultPrevented || event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  const target = new URL(anchor.href, location.href);
  if (target.origin !== location.origin || target.pathname !== location.pathname || target.hash || anchor.target) return;
  event.preventDefault();
  history.pushState({}, "", target.pathname + target.search);
  render().then(() => settle(anchor.rel));
});

/** Shows a new page from its start; the focus, where it was in the page before, goes to the same link or to the content. */
function settle(rel = "") {
  scrollTo(0, 0);
  const main = document.getElementById("main");
  if (document.activeElement !== document.body) return;
  (rel && main.querySelector(`a[rel="${CSS.escape(rel)}"][href]`) || main).focus({ preventScroll: true });
}

addEventListener("popstate", () => render());

async function toGrid() {
  const { n } = state();
  history.pushState({}, "", paging.back);
  await render();
  const found = document.querySelector(`.card[data-index="${CSS.escape(n)}"]`);
  found?.focus();
  found?.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.isComposing) return;
  const { target, key } = event;
  if (key === "Escape" && target.id === "search") { target.blur(); document.querySelector(".card")?.focus(); return; }
  if (inText(target) || event.ctrlKey || event.metaKey) return;
  if (key === "/") { event.preventDefault(); document.getElementById("search").select(); document.getElementById("search").focus(); return; }
  if (key === "?") { event.preventDefault(); help(); return; }
  if (key === "Escape") {
    if (paging.back) { event.preventDefault(); toGrid(); } else document.querySelector("#main [data-back]")?.click();
    return;
  }
  if (usesArrows(target)) return;
  const turn = (where) => { if (where) { event.preventDefault(); history.pushState({}, "", where); render().then(() => settle()); } };
  if (event.altKey) return;
  if (key === "PageDown" && event.shiftKey) return turn(paging.next);
  if (key === "PageUp" && event.shiftKey) return turn(paging.previous);
  if (paging.back) {
    if (key === "ArrowRight") turn(paging.next);
    else if (key === "ArrowLeft") turn(paging.previous);
    return;
  }
  gridKeys(event, document.getElementById("main"));
});

frame();
render();
