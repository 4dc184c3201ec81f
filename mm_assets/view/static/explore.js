// The exploring pages: SQL, drops, scores, partitions and origins of a dataset; its versions are in versions.js.
//
// Like app.js: the URL has the state of a page, and texts only ever become text nodes. A page draws into `root` and asks
// by `api`. What a person moves (a threshold, a text) changes the URL without drawing the page again.

import { baseName, bytesText, choice, count, failure, field, fill, keep, openLink, plural, queryError, say, short, stepLink } from "./explore_tools.js";
import { filterPage, showFilter, sortControl as sortBy } from "./filter.js";
import { showCompared, showVersions } from "./versions.js";

const SVG = "http://www.w3.org/2000/svg";
const found = await fetch("api/explore").then((answer) => answer.json()).catch(() => ({ available: false, has_columns: false }));
const { available } = found;

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) node.setAttribute(key, String(value));
  node.append(...children);
  return node;
}

function table(api, headings, rows, label, numbers = []) {
  const { h } = api;
  const numeric = new Set(numbers);
  return h("div", { class: "scroll x-table", tabindex: "0", role: "region", "aria-label": label }, h("table", {},
    h("thead", {}, h("tr", {}, ...headings.map((heading, at) => h("th", { scope: "col", class: numeric.has(at) ? "number" : undefined }, heading)))),
    h("tbody", {}, ...rows.map((cells) => h("tr", {}, ...cells.map((cell, at) => h("td", { class: numeric.has(at) ? "number" : undefined }, cell ?? "")))))));
}

const placeOf = (row) => (row.sample_id !== null && row.sample_id !== undefined && row.position !== null && row.modality
  ? { partition: row.partition, sample_id: row.sample_id, position: row.position, modality: row.modality }
  : { partition: row.partition, shard: row.shard, member: row.member, byte_offset: row.byte_offset });

function queryOf(place) {
  return new URLSearchParams(Object.entries(place).filter(([, value]) => value !== null && value !== undefined && value !== "")).toString();
}

// --- SQL ----------------------------------------------------------------------------------------------------------

const EXAMPLE = "select modality, count(*) as rows\nfrom filtered_rows\ngroup by all\norder by rows desc";

async function showSql(root, api, now) {
  const { h } = api;
  const editor = h("textarea", { id: "sql", rows: "7", spellcheck: "false", autocapitalize: "off", autocomplete: "off", "aria-describedby": "sql-help" });
  editor.value = now.sql ?? EXAMPLE;
  const result = h("div", { id: "sql-result" });
  const run = h("button", { type: "submit", class: "x-main" }, "Run");
  const cancel = h("button", { type: "button", disabled: true }, "Cancel");
  const relations = h("div", { class: "x-relations" }, h("p", { class: "muted" }, "Reading the relations…"));
  let running = null;

  const insert = (text) => {
    editor.focus();
    editor.setRangeText(text, editor.selectionStart, editor.selectionEnd, "end");
  };

  async function start({ push }) {
    const sql = editor.value;
    if (running) api.post("api/explore/cancel", { id: running }).catch(() => {});
    const mine = running = crypto.randomUUID?.() ?? String(Math.random());
    keep(api, { part: now.part, page: "sql", sql }, { push });
    cancel.disabled = false;
    result.setAttribute("aria-busy", "true");
    result.replaceChildren(h("p", { class: "muted" }, "Running…"));
    let shown;
    try {
      const found = await api.post("api/explore/sql", { sql, id: mine });
      if (running !== mine) return;
      shown = found.error ? queryError(api, found, sql, editor) : rowsOf(api, found);
    } catch (error) {
      if (running !== mine) return;
      shown = [failure(api, error)];
    }
    running = null;
    cancel.disabled = true;
    result.removeAttribute("aria-busy");
    result.replaceChildren(...shown);
  }

  cancel.addEventListener("click", () => { if (running) api.post("api/explore/cancel", { id: running }).catch(() => {}); });
  editor.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); start({ push: true }); }
  });
  root.replaceChildren(
    h("div", { class: "x-sql" },
      h("form", { class: "x-editor", onsubmit: (event) => { event.preventDefault(); start({ push: true }); } },
        field(api, "SQL (DuckDB)", editor),
        h("div", { class: "bar" }, run, cancel, h("span", { id: "sql-help", class: "muted" }, "Ctrl+Enter runs it. Rows with partition and sample_id open their sample. One statement that reads; 15 seconds, 1,000 rows."))),
      h("details", { class: "x-side", open: matchMedia("(min-width: 900px)").matches }, h("summary", {}, "Relations"), relations)),
    result);
  fill(api, relations, async () => {
    const found = await api.get("api/explore/relations");
    return found.relations.map((relation) => h("details", {},
      h("summary", {}, relation.name),
      h("ul", {},
        h("li", {}, h("button", { type: "button", class: "x-plain", onclick: () => insert(relation.name), "aria-label": `Insert ${relation.name}` }, "insert its name")),
        ...relation.columns.map(([name, type]) => h("li", {},
          h("button", { type: "button", class: "x-plain", onclick: () => insert(/^[a-z_][a-z0-9_]*$/.test(name) ? name : `"${name.replaceAll('"', '""')}"`) }, name),
          h("span", { class: "muted" }, ` ${type.toLowerCase()}`))))));
  });
  if (now.sql) await start({ push: false });
  else editor.focus({ preventScroll: true });
}

function rowsOf(api, found) {
  const { h } = api;
  const names = found.columns.map((column) => column.name);
  const id = names.indexOf("sample_id");
  const partition = names.indexOf("partition");
  const numeric = found.columns.flatMap((column, at) => (/INT|DOUBLE|FLOAT|DECIMAL/.test(column.type) ? [at + (id >= 0 ? 1 : 0)] : []));
  const cell = (value) => (value === null ? h("span", { class: "muted" }, "null") : typeof value === "number" ? short(value) : String(value));
  const rows = found.rows.map((row) => {
    const cells = row.map(cell);
    if (id >= 0) {
      const known = row[id] !== null;
      cells.unshift(known ? h("a", { href: openLink(api, partition >= 0 ? row[partition] : "", row[id]), "aria-label": `Open sample ${row[id]}` }, "open") : "");
    }
    return cells;
  });
  const said = `${plural(found.rows.length, "row")}${found.truncated ? ", and more that are not shown" : ""} in ${found.seconds} s`;
  say(said);
  return [h("p", { class: "muted" }, said), table(api, id >= 0 ? ["", ...names] : names, rows, "Result", numeric)];
}

// --- drops --------------------------------------------------------------------------------------------------------

const KIND_NAMES = { dropped: "Dropped by filters", lost: "Lost", kept: "Published in spite of a fault", harmless: "Harmless" };

async function showDrops(root, api, now) {
  const { h } = api;
  const { totals } = await api.get("api/explore/totals");
  const isDrop = (total) => total.stage === "filtered_rows" && (total.kind === "dropped" || total.kind === "lost");
  const keyOf = (total) => `${total.stage}/${total.reason}`;
  const chosen = totals.find((total) => keyOf(total) === now.of) ?? (now.of ? null : totals.find(isDrop) ?? totals[0] ?? null);
  const state = { part: now.part, page: "drops", of: now.of, partition: now.partition };
  const place = h("div", { id: "drops" });
  const kinds = Object.keys(KIND_NAMES).filter((kind) => totals.some((total) => total.kind === kind));
  const select = h("select", { id: "reason", onchange: (event) => api.go({ ...state, of: event.target.value }) },
    chosen ? null : h("option", { value: now.of, selected: true }, now.of),
    ...kinds.map((kind) => h("optgroup", { label: KIND_NAMES[kind] }, ...totals.filter((total) => total.kind === kind)
      .map((total) => h("option", { value: keyOf(total), selected: total === chosen }, `${total.reason} (${count(total.count)})`)))));
  if (!totals.length) { root.replaceChildren(h("p", { class: "note" }, "Nothing was dropped, rejected or found faulty.")); return; }
  root.replaceChildren(
    h("div", { class: "x-controls" }, field(api, "Reason", select),
      now.partition ? h("a", { class: "button", href: api.link({ ...state, partition: undefined }) }, `only ${now.partition} ✕`) : null),
    chosen ? h("p", { class: "muted" }, `${plural(chosen.count, "item")} of ${chosen.stage}. What to do: ${chosen.advice}.`) : null,
    place);
  place.replaceChildren(h("p", { class: "muted" }, "Reading the tables, of very many partitions for some seconds…"));
  await fill(api, place, async () => {
    const [stage, reason] = chosen ? [chosen.stage, chosen.reason] : now.of.split(/\/(.*)/s);
    const found = await api.get("api/explore/losses", { stage, reason, partition: now.partition, after: now.after });
    const cards = bySample(found.losses).map((losses) => lossCard(api, losses));
    const rows = found.losses.length;
    const next = found.after === null ? null : api.link({ ...state, after: found.after });
    const said = rows ? `${plural(rows, "item")}${cards.length < rows ? ` of ${plural(cards.length, "sample")}` : ""}${now.after ? " of a later page" : ""}` : next ? `None up to partition ${found.after.split(/:(.*)/s)[1]}: go on with Next` : "None here";
    say(said);
    return [
      h("div", { class: "bar" }, h("span", { class: "x-grow muted" }, said), now.after ? h("a", { class: "button", href: api.link(state) }, "↑ First page") : null, stepLink(api, "Next →", next, "next")),
      h("ol", { class: "grid", "aria-label": "Drops" }, ...cards),
    ];
  });
}

/** What decided, in the words of the filter: "4, min_width is 10". */
function measured(loss) {
  if (loss.value === null) return loss.detail;
  return `${short(loss.value)}${loss.setting ? `, ${loss.setting} is ${short(loss.limit)}` : ""}`;
}

/** Rows of one sample with one reason, which follow each other: a filter of samples drops all rows of one. */
function bySample(losses) {
  const groups = [];
  for (const loss of losses) {
    const last = groups.at(-1)?.[0];
    const same = last && loss.modality !== null && ["partition", "sample_id", "reason"].every((name) => last[name] === loss[name]);
    if (same) groups.at(-1).push(loss);
    else groups.push([loss]);
  }
  return groups;
}

function lossCard(api, losses) {
  const loss = losses.find((row) => !["metadata", "text"].includes(row.modality)) ?? losses.find((row) => row.modality === "text") ?? losses[0];
  const rows = losses.filter((row) => row.modality).map((row) => (row.modality === "metadata" ? "metadata" : `${row.modality} ${row.position}`));
  const times = loss.count > 1 ? ` (${count(loss.count)} times)` : "";
  const why = loss.modality && loss.kind !== "kept" ? loss.reason.replace(/\.([^.]*)$/, ": $1") : loss.reason;
  const where = [rows.join(", ") || loss.member, loss.partition].filter(Boolean).join(" · ");
  return lostCard(api, loss, loss.sample_id ?? loss.member ?? loss.partition, `${why}${times}`, measured(loss), where);
}

function lostCard(api, item, title, why, detail, where) {
  const { h } = api;
  const place = placeOf(item);
  const canShow = (place.modality && place.modality !== "metadata") || (place.member && place.shard);
  const picture = canShow && (!place.modality || !["text", "metadata"].includes(place.modality))
    ? h("img", { src: `explore/thumbnail?${queryOf(place)}`, alt: "", loading: "lazy", decoding: "async", draggable: "false", onerror: (event) => event.target.replaceWith(h("span", {}, "no picture")) })
    : h("span", {}, item.modality ?? "no content");
  const body = [
    h("div", { class: "thumb" }, picture),
    h("div", { class: "words" },
      h("span", { class: "id", title }, title),
      h("span", { class: "x-why" }, why),
      detail ? h("span", { class: "text", title: detail }, detail) : null,
      h("span", { class: "names", title: where }, where)),
  ];
  return h("li", {}, canShow || place.modality ? h("a", { class: "card x-lost", href: api.link({ page: "content", ...place }) }, ...body) : h("div", { class: "card x-lost" }, ...body));
}

// --- content of a row or member -------------------------------------------------------------------------------------

async function showContent(root, api, now) {
  const { h } = api;
  const place = { partition: now.partition, sample_id: now.sample_id, position: now.position, modality: now.modality, shard: now.shard, member: now.member, byte_offset: now.byte_offset };
  const holder = h("div", { class: "body" });
  const rows = h("div", { id: "rows" });
  const title = now.sample_id ? `${now.sample_id}` : now.member;
  root.replaceChildren(
    h("div", { class: "bar" }, h("button", { type: "button", "data-back": true, onclick: () => history.back() }, "← Back"), h("h2", { class: "x-grow" }, title),
      now.sample_id ? h("a", { class: "button", href: openLink(api, now.partition, now.sample_id) }, "Its sample, if it is packed") : null),
    h("section", { class: "item x-content", "aria-label": "Content" }, holder), rows);
  document.title = title;
  await fill(api, holder, async () => {
    const item = await api.get("api/explore/item", place);
    const { renderItem } = await import("./items.js");
    if (!document.querySelector('link[href="static/items.css"]')) document.head.append(h("link", { rel: "stylesheet", href: "static/items.css" }));
    const facts = Object.entries(item.facts);
    return [
      h("header", {}, h("h3", {}, item.name), h("span", { class: "kind" }, item.kind)),
      facts.length ? h("dl", { class: "facts" }, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))) : null,
      item.note ? h("p", { class: "note" }, item.note) : null,
      renderItem(item, { items: [item], clock: new EventTarget(), mount: () => null }),
    ];
  });
  if (now.sample_id) await fill(api, rows, () => originOf(api, { part: now.partition, sample_id: now.sample_id }));
}

// --- scores -------------------------------------------------------------------------------------------------------

const WIDTH = 720;
const HEIGHT = 260;
const BEYOND = 110; // of the axis, up to a limit that no value reaches
const PAD = { left: 16, right: 16, top: 36, bottom: 32 };

async function showScores(root, api, now) {
  const { h } = api;
  const { scores } = await api.get("api/explore/scores");
  if (!scores.length) { root.replaceChildren(h("p", { class: "note" }, "There are no measures: add an annotator or a filter.")); return; }
  const score = scores.find((one) => one.name === now.score) ?? scores[0];
  const state = { part: now.part, page: "scores", score: score.name, partition: now.partition };
  const title = (one) => `${one.name}${one.limits.length ? " — has a limit" : ""}`;
  const place = h("div", { id: "histogram" });
  root.replaceChildren(
    h("div", { class: "x-controls" },
      choice(api, "Measure", scores.map((one) => [one.name, title(one)]), score.name, (value) => api.go({ ...state, score: value, at_least: undefined, at_most: undefined })),
      now.partition ? h("a", { class: "button", href: api.link({ ...state, partition: undefined }) }, `only ${now.partition} ✕`) : null),
    place);
  place.replaceChildren(h("p", { class: "muted" }, "Reading the tables, of very many partitions for some seconds…"));
  await fill(api, place, async () => {
    const found = await api.get("api/explore/histogram", { score: score.name, partition: now.partition });
    if (!found.bins.length) return h("p", { class: "note" }, "No row has a value of this measure.");
    return drawHistogram(api, found, state, now);
  });
}

function drawHistogram(api, found, state, now) {
  const { h } = api;
  const { bins, score } = found;
  const bottom = HEIGHT - PAD.bottom;
  const most = Math.max(...bins.map((bin) => bin.kept + bin.dropped), 1);
  // Rows of a full bin would hide those of others: heights are of the square root where they differ a lot.
  const isRoot = most > 50 * Math.max(...bins.map((bin) => bin.kept + bin.dropped).filter(Boolean).sort((a, b) => a - b).slice(0, Math.ceil(bins.length / 2)), 1);
  const height = (rows) => (isRoot ? Math.sqrt(rows / most) : rows / most) * (bottom - PAD.top);
  // The axis has the bins, of equal width or of equal ratio, and on either side, if a limit is beyond them, a part of its
  // own up to that limit: places from -1 to 0, and one more than there are bins.
  const ends = { low: found.low, high: found.high };
  const x = (place) => {
    const [left, right] = [ends.low < found.low ? BEYOND : 0, ends.high > found.high ? BEYOND : 0];
    const inner = WIDTH - PAD.left - PAD.right - left - right;
    if (place < 0) return PAD.left + (place + 1) * left;
    return PAD.left + left + (Math.min(place, bins.length) / bins.length) * inner + Math.max(place - bins.length, 0) * right;
  };
  const placeAt = (at) => {
    const [first, last] = [x(0), x(bins.length)];
    if (at < first) return ends.low < found.low ? Math.max((at - first) / BEYOND, -1) : 0;
    if (at > last) return ends.high > found.high ? bins.length + Math.min((at - last) / BEYOND, 1) : bins.length;
    return ((at - first) / (last - first)) * bins.length;
  };
  const placeOfValue = (value) => {
    if (value < found.low) return ends.low < found.low ? Math.max((value - found.low) / (found.low - ends.low), -1) : 0;
    if (value > found.high) return ends.high > found.high ? bins.length + Math.min((value - found.high) / (ends.high - found.high), 1) : bins.length;
    const at = bins.findIndex((bin) => value < bin.high);
    return at < 0 ? bins.length : at + (value - bins[at].low) / (bins[at].high - bins[at].low);
  };
  const valueAt = (place) => {
    if (place < 0) return found.low + place * (found.low - ends.low);
    if (place > bins.length) return found.high + (place - bins.length) * (ends.high - found.high);
    if (place === bins.length) return found.high;
    const bin = bins[Math.floor(place)];
    return bin.low + (place - Math.floor(place)) * (bin.high - bin.low);
  };
  const limitOf = (side) => score.limits.find((limit) => limit.keeps === side)?.value ?? null;
  const given = (name) => (now[name] !== undefined && now[name] !== "" && Number.isFinite(Number(now[name])) ? Number(now[name]) : null);
  const limits = { at_least: given("at_least") ?? limitOf("at_least"), at_most: given("at_most") ?? limitOf("at_most") };

  const plot = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "x-plot", role: "group", "aria-label": `Histogram of ${score.name}` });
  const under = svg("g", {});
  plot.append(under);
  function drawAxis() {
    const values = [found.low, found.high, ...score.limits.map((limit) => limit.value), ...Object.values(limits)].filter((value) => value !== null);
    Object.assign(ends, { low: Math.min(...values), high: Math.max(...values) });
    const bars = bins.map((bin, at) => {
      const width = Math.max(x(at + 1) - x(at) - 1, 0.5);
      const kept = height(bin.kept + bin.dropped) * (bin.kept / Math.max(bin.kept + bin.dropped, 1));
      const dropped = height(bin.kept + bin.dropped) - kept;
      return svg("g", { class: "x-bin" }, svg("title", {}, `${short(bin.low)} to ${short(bin.high)}: ${count(bin.kept)} kept, ${count(bin.dropped)} dropped`),
        kept ? svg("rect", { x: x(at), y: bottom - kept, width, height: kept, class: "x-kept" }) : "",
        dropped ? svg("rect", { x: x(at), y: bottom - kept - dropped, width, height: dropped, class: "x-dropped" }) : "");
    });
    const [isLow, isHigh] = [ends.low < found.low, ends.high > found.high];
    const beyond = [isLow ? [-1, 0] : null, isHigh ? [bins.length, bins.length + 1] : null].filter(Boolean);
    const ticks = [isLow ? -1 : null, ...[0, 1, 2, 3, 4].map((tick) => (tick / 4) * bins.length), isHigh ? bins.length + 1 : null].filter((place) => place !== null);
    const anchor = (place, at) => (at === 0 ? "start" : at === ticks.length - 1 ? "end" : "middle");
    under.replaceChildren(...bars,
      svg("line", { x1: x(0), x2: x(bins.length), y1: bottom, y2: bottom, class: "x-axis" }),
      ...beyond.map(([from, to]) => svg("line", { x1: x(from), x2: x(to), y1: bottom, y2: bottom, class: "x-axis x-beyond" })),
      ...ticks.map((place, at) => svg("text", { x: x(place), y: bottom + 22, class: "x-tick", "text-anchor": anchor(place, at) }, short(valueAt(place)))),
      svg("text", { x: PAD.left, y: 18, class: "x-tick" }, `up to ${plural(most, "row")} in a bar${isRoot ? ", heights by square root" : ""}${found.is_log ? ", widths of equal ratio" : ""}`),
      ...score.limits.map((limit) => {
        const at = x(placeOfValue(limit.value));
        return svg("line", { x1: at, x2: at, y1: PAD.top, y2: bottom, class: "x-applied" }, svg("title", {}, `${limit.filter}.${limit.setting}: ${short(limit.value)}`));
      }));
  }
  drawAxis();

  const said = h("output", { class: "x-said", "aria-live": "polite" }, "…");
  const inputs = {};
  const lines = {};
  const titles = { at_least: "Smallest kept", at_most: "Largest kept" };

  let asking = false;
  let waiting = false;
  async function ask() { // one request at a time, and the last limits always
    if (asking) { waiting = true; return; }
    asking = true;
    do {
      waiting = false;
      try {
        const kept = await api.get("api/explore/kept", { score: score.name, at_least: limits.at_least ?? undefined, at_most: limits.at_most ?? undefined, partition: state.partition });
        if (!waiting) {
          const rows = kept.is_exact ? `would keep ${count(kept.kept)} of ${count(kept.total)}` : `would keep at most ${count(kept.kept)} of ${count(kept.total)}`;
          said.replaceChildren(h("strong", {}, rows), kept.note ? h("span", { class: "muted" }, ` (${kept.note})`) : "");
          said.dataset.kept = kept.kept;
        }
      } catch (error) { said.textContent = error.message; }
    } while (waiting);
    asking = false;
  }

  function show(side) {
    const value = limits[side];
    const at = x(placeOfValue(value ?? (side === "at_least" ? ends.low : ends.high)));
    lines[side].setAttribute("transform", `translate(${at} 0)`);
    lines[side].setAttribute("aria-valuemin", String(ends.low));
    lines[side].setAttribute("aria-valuemax", String(ends.high));
    lines[side].setAttribute("aria-valuenow", String(value ?? (side === "at_least" ? ends.low : ends.high)));
    lines[side].setAttribute("aria-valuetext", value === null ? "no limit" : short(value));
    lines[side].classList.toggle("x-none", value === null);
    if (document.activeElement !== inputs[side]) inputs[side].value = value === null ? "" : String(value);
  }

  function set(side, value) {
    limits[side] = value;
    if (value !== null && (value < ends.low || value > ends.high)) {
      drawAxis();
      for (const other of Object.keys(limits)) show(other);
    } else show(side);
    keep(api, { ...state, at_least: limits.at_least === limitOf("at_least") ? undefined : limits.at_least ?? undefined, at_most: limits.at_most === limitOf("at_most") ? undefined : limits.at_most ?? undefined });
    rows.href = api.link(rowsLink());
    ask();
  }

  const clamp = (place) => Math.min(Math.max(place, placeOfValue(ends.low)), placeOfValue(ends.high));
  const rounded = (place) => {
    const value = valueAt(place);
    return found.high - found.low > 50 ? Math.round(value) : Number(value.toPrecision(4));
  };

  function rowsLink() {
    const column = `"${(score.column ?? "").replaceAll('"', '""')}"`;
    const outside = [limits.at_least === null ? null : `${column} < ${limits.at_least}`, limits.at_most === null ? null : `${column} > ${limits.at_most}`].filter(Boolean);
    return { part: now.part, page: "filter", where: outside.join(" or "), order: score.column };
  }

  for (const side of ["at_least", "at_most"]) {
    const handle = svg("g", { class: `x-limit x-${side}`, tabindex: "0", role: "slider", "aria-label": titles[side], "aria-orientation": "horizontal" },
      svg("line", { x1: 0, x2: 0, y1: PAD.top - 6, y2: bottom + 4 }),
      svg("rect", { x: -14, y: PAD.top - 14, width: 28, height: bottom - PAD.top + 22, class: "x-hit" }),
      svg("path", { d: `M0 ${PAD.top - 8} h${side === "at_least" ? 14 : -14} l${side === "at_least" ? -14 : 14} 12 z` }));
    lines[side] = handle;
    const placeOfPointer = (event) => {
      const box = plot.getBoundingClientRect();
      return placeAt(((event.clientX - box.left) / box.width) * WIDTH);
    };
    handle.addEventListener("pointerdown", (event) => { event.preventDefault(); handle.focus(); handle.setPointerCapture(event.pointerId); });
    handle.addEventListener("pointermove", (event) => { if (handle.hasPointerCapture(event.pointerId)) set(side, rounded(placeOfPointer(event))); });
    handle.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 }[event.key];
      const at = placeOfValue(limits[side] ?? (side === "at_least" ? ends.low : ends.high));
      if (event.key === "Home" || event.key === "End") { event.preventDefault(); set(side, event.key === "Home" ? found.low : found.high); return; }
      if (event.key === "Delete" || event.key === "Backspace") { event.preventDefault(); set(side, null); return; }
      if (step === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      let value = limits[side];
      for (let size = (step * bins.length) / 200; value === limits[side] && Math.abs(size) < bins.length; size *= 2) value = rounded(clamp(at + size));
      set(side, value);
    });
    plot.append(handle);
    inputs[side] = h("input", { type: "number", step: "any", id: side, oninput: (event) => { set(side, event.target.value === "" ? null : Number(event.target.value)); } });
  }

  const rows = h("a", { class: "button", hidden: score.column === null || ["content_bytes", "text_chars"].includes(score.column) }, "Rows outside of the limits");
  for (const side of ["at_least", "at_most"]) show(side);
  rows.href = api.link(rowsLink());
  ask();
  return [
    h("div", { class: "x-scroll" }, plot),
    h("p", { class: "x-legend muted" },
      h("span", { class: "x-key x-kept" }), `${plural(found.num_kept, "row")} kept`,
      h("span", { class: "x-key x-dropped" }), `${count(found.num_dropped)} dropped by a limit on it`),
    h("div", { class: "x-controls" }, field(api, titles.at_least, inputs.at_least), field(api, titles.at_most, inputs.at_most), rows,
      h("button", { type: "button", onclick: () => { for (const side of ["at_least", "at_most"]) set(side, limitOf(side)); } }, "As it is")),
    h("p", {}, "These limits ", said),
    score.note ? h("p", { class: "note" }, score.note) : null,
    score.limits.length ? table(api, ["filter", "setting", "limit", "drops"], score.limits.map((limit) => [limit.filter, limit.setting, short(limit.value),
      h("a", { href: api.link({ part: now.part, page: "drops", of: `filtered_rows/${limit.filter}.${limit.reason}` }) }, limit.reason)]), "Limits", [2]) : h("p", { class: "muted" }, "No filter limits this measure."),
  ];
}

// --- partitions ---------------------------------------------------------------------------------------------------

const PARTITIONS = 200;

async function showPartitions(root, api, now) {
  const { h } = api;
  const offset = Number(now.offset ?? 0) || 0;
  const found = await api.get("api/partitions", { offset, limit: PARTITIONS });
  const total = found.total ?? found.partitions.length;
  const state = { page: "partitions" };
  const before = offset > 0 ? api.link({ ...state, offset: Math.max(offset - PARTITIONS, 0) }) : null;
  const more = offset + PARTITIONS < total ? api.link({ ...state, offset: offset + PARTITIONS }) : null;
  const rows = found.partitions.map((one) => [
    h("a", { href: api.link({ part: one.key }) }, one.key),
    h("span", { class: `x-state x-${String(one.state ?? "").split(/\W/)[0]}` }, one.state ?? ""),
    one.samples === null || one.samples === undefined ? "" : count(one.samples), h("span", { title: `${count(one.bytes ?? 0)} bytes` }, bytesText(one.bytes)), count(one.shards ?? 0),
    h("a", { href: api.link({ page: "drops", partition: one.key }), "aria-label": `Drops of ${one.key}` }, "drops"),
    h("a", { href: api.link({ page: "scores", partition: one.key }), "aria-label": `Scores of ${one.key}` }, "scores"),
  ]);
  const said = plural(total, "partition");
  root.replaceChildren(
    h("div", { class: "bar" }, h("span", { class: "x-grow muted" }, said), stepLink(api, "← Previous", before, "prev"), stepLink(api, "Next →", more, "next")),
    table(api, ["partition", "state", "samples", "bytes", "shards", "", ""], rows, "Partitions", [2, 3, 4]));
  say(said);
}

// --- origin -------------------------------------------------------------------------------------------------------

async function originOf(api, parameters) {
  const { h } = api;
  const found = await api.get("api/explore/origin", parameters);
  const { partition } = found;
  const rows = found.rows.map((row) => {
    const range = row.byte_offset === null ? "" : `${count(row.byte_offset)} to ${count(row.byte_offset + row.byte_size)}`;
    const sum = h("span", { class: "x-sum" }, row.crc32c === null ? "" : `CRC-32C ${row.crc32c.toString(16).padStart(8, "0")}`);
    const check = h("button", { type: "button", class: "x-plain", "aria-label": `Read ${row.modality} ${row.position} and compute its checksums`, onclick: () => fill(api, sum, async () => {
      const sums = await api.get("api/explore/checksum", placeOf(row));
      const same = row.crc32c === null ? "" : sums.crc32c === row.crc32c ? " ✓ as in the table" : " ✗ not as in the table";
      return [`CRC-32C ${sums.crc32c.toString(16).padStart(8, "0")}${same}, SHA-256 ${sums.sha256.slice(0, 16)}…`];
    }) }, "check");
    return [
      row.modality === "metadata" ? "metadata" : `${row.modality} ${row.position}`,
      row.dropped ? h("span", { class: "x-dropped-row" }, `dropped: ${row.dropped}${row.value === null ? "" : `, ${short(row.value)}`}`) : row.error ? h("span", { class: "x-dropped-row" }, row.error) : "",
      row.content_type ?? "",
      row.member === null ? "" : h("a", { href: api.link({ page: "origin", shard: baseName(row.shard), member: row.member }), title: "Rows of this member" }, row.member),
      h("span", { title: row.shard ?? "" }, baseName(row.shard)), range, bytesText(row.content_size ?? row.byte_size),
      h("span", {}, sum, " ", check),
      h("a", { href: api.link({ page: "content", ...placeOf(row) }), "aria-label": `Show ${row.modality} ${row.position}` }, "show"),
    ];
  });
  const files = Object.entries(found.packed).map(([form, file]) => [form.toUpperCase(), file.path, bytesText(file.size), file.sha256]);
  return [
    h("p", { class: "muted" }, "Partition ", h("a", { href: api.link({ part: partition }) }, partition)),
    rows.length ? table(api, ["row", "", "type", "member", "shard", "bytes", "size", "checksum", ""], rows, "Rows of the sample", [5, 6]) : h("p", { class: "note" }, "The partition's tables do not have this sample: they are of another version, or the sample was never a row."),
    files.length ? table(api, ["packed", "file", "size", "SHA-256"], files, "Packed files", [2]) : null,
  ];
}

async function showOrigin(root, api, now) {
  const { h } = api;
  const place = h("div", { id: "found" });
  const packed = h("span", { class: "muted" });
  const inputs = Object.fromEntries([["shard", "captions-00000.tar"], ["member", "0001.jpg"], ["byte", "1536"]].map(([name, example]) => [name,
    h("input", { type: name === "byte" ? "number" : "text", min: "0", id: name, value: now[name] ?? "", placeholder: example, spellcheck: "false", autocapitalize: "off", autocomplete: "off" })]));
  const submit = (event) => {
    event.preventDefault();
    api.go({ page: "origin", ...Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, input.value.trim()])) });
  };
  root.replaceChildren(
    h("form", { class: "x-controls", onsubmit: submit }, field(api, "Shard", inputs.shard), field(api, "Member", inputs.member), field(api, "or byte", inputs.byte), h("button", { type: "submit", class: "x-main" }, "Find samples")),
    now.sample_id ? h("div", { class: "bar" }, h("h2", { class: "x-grow" }, now.sample_id), packed) : "",
    place);
  if (now.sample_id && now.partition) {
    api.get("api/explore/locate", { partition: now.partition, sample_id: now.sample_id }).then((found) => packed.append(found.n === null ? "It is not packed."
      : h("a", { class: "button", href: openLink(api, now.partition, now.sample_id) }, "Open the sample")), (error) => packed.append(error.message));
  }
  if (now.sample_id) {
    if (now.partition) await fill(api, place, () => originOf(api, { part: now.partition, sample_id: now.sample_id }));
    else place.replaceChildren(h("p", { class: "note" }, "Which partition it is of is not known: select the column `partition` too."));
  } else if (now.shard) {
    await fill(api, place, async () => {
      const found = await api.get("api/explore/at", { shard: now.shard, member: now.member, byte: now.byte });
      if (!found.partitions.length) return h("p", { class: "note" }, "No partition has a shard of this name.");
      if (!found.rows.length) return h("p", { class: "note" }, `Nothing at this place became a row of ${found.partitions.join(", ")}.`);
      return table(api, ["sample", "row", "", "member", "bytes", "partition"], found.rows.map((row) => [
        h("a", { href: openLink(api, row.partition, row.sample_id) }, row.sample_id), row.modality === "metadata" ? "metadata" : `${row.modality} ${row.position}`, row.dropped ? `dropped: ${row.dropped}` : "",
        row.member ?? "", row.byte_offset === null ? "" : `${count(row.byte_offset)} to ${count(row.byte_offset + row.byte_size)}`, row.partition]), "Rows at this place", [4]);
    });
  } else place.replaceChildren(h("p", { class: "muted" }, "The end of a shard's name, and a member or a position in it, lead to the samples that came from there. A sample's page has the other way."));
}

/** Goes on to a sample where it is packed, else to where it came from. */
async function openSample(root, api, now) {
  root.replaceChildren(api.h("p", { class: "muted" }, "Looking for the sample…"));
  const found = await api.get("api/explore/locate", { partition: now.partition, sample_id: now.sample_id });
  if (found.n !== null) await api.go({ part: found.part, n: found.n, back: now.back }, { replace: true });
  else await api.go({ page: "origin", partition: now.partition, sample_id: now.sample_id }, { replace: true });
}

/** Where a sample came from, below its page. */
export function samplePanel(root, api, now) {
  if (!available) return;
  const place = api.h("div", {});
  const details = api.h("details", { class: "x-origin" }, api.h("summary", {}, "Where it came from"), place);
  details.addEventListener("toggle", () => { if (details.open && !place.childNodes.length) fill(api, place, () => originOf(api, { part: now.part, n: now.index, sample_id: now.id })); });
  root.replaceChildren(details);
}

// --- pages --------------------------------------------------------------------------------------------------------

export { filterPage };

/** What the grid of samples is sorted and filtered by, or why it is not. */
export const sortControl = (api, now) => (found.has_columns ? sortBy(api, now, available)
  : [api.h("span", { class: "muted" }, "In stored order: sorting and filtering take packed samples.")]);

/** The pages of the navigation by their name in the URL; there are three more, which other pages lead to. */
export const pages = {};
if (found.has_columns) pages.filter = { title: "Filter", render: (root, api, now) => showFilter(root, api, now, available) };
if (available) {
  Object.assign(pages, {
    sql: { title: "SQL", render: showSql },
    drops: { title: "Drops", render: showDrops },
    scores: { title: "Scores", render: showScores },
    partitions: { title: "Partitions", render: showPartitions },
    versions: { title: "Versions", render: showVersions },
    origin: { title: "Origin", render: showOrigin },
  });
  for (const [name, render] of Object.entries({ open: openSample, content: showContent, compare: showCompared })) {
    Object.defineProperty(pages, name, { value: { title: name, render }, enumerable: false });
  }
}
