// Samples sorted and filtered by a condition: the page "Filter", and the control on the grid that leads to it.
//
// The relation `samples` is of what the packed files hold; the others are a dataset's tables, of which a row counts.

import { choice, field, fill, plural, queryError, say, short, stepLink } from "./explore_tools.js";

const ROWS = "filtered_rows";
const SAMPLES = "samples";
const LIMIT = 50;
const answers = new Map(); // relations by partition: they are asked for once

/** The relations that samples can be chosen by, each with its columns. */
function relationsOf(api, part, available) {
  const key = part ?? "";
  if (!answers.has(key)) {
    const asked = Promise.all([api.get("api/columns", { part }), available ? api.get("api/explore/relations") : { relations: [] }])
      .then((found) => found.flatMap((one) => one.relations))
      .then((all) => all.filter((one) => one.name === SAMPLES || ["partition", "sample_id"].every((name) => one.columns.some(([column]) => column === name))));
    asked.catch(() => answers.delete(key));
    answers.set(key, asked);
  }
  return answers.get(key);
}

/** A choice of what the grid is sorted by: it leads to the page, where a condition can be added. */
export function sortControl(api, now, available) {
  const { h } = api;
  const select = h("select", { class: "x-sort", "aria-label": "Sort by", onchange: () => {
    const [relation, order] = JSON.parse(select.value);
    api.go({ part: now.part, page: "filter", relation, order });
  } }, h("option", { value: "" }, "Sort by…"));
  relationsOf(api, now.part, available).then((relations) => select.append(
    ...relations.filter((one) => [SAMPLES, ROWS].includes(one.name)).map((one) => h("optgroup", { label: one.name },
      ...one.columns.map(([name]) => h("option", { value: JSON.stringify([one.name, name]) }, name))))),
  (error) => { select.disabled = true; select.title = error.message; });
  return [select];
}

/** A page of the samples that a state of this page lists, with the states of the pages before and after it. */
export async function filterPage(api, state, { fresh = false, signal } = {}) {
  const { part, where, order, direction } = state;
  const offset = Number(state.offset ?? 0) || 0;
  const asked = { part, where, order, direction, offset, limit: LIMIT };
  const found = state.relation === SAMPLES ? await api.cached("api/select", asked, signal, { fresh })
    : await api.cached("api/explore/select", { ...asked, relation: state.relation ?? ROWS }, signal, { fresh });
  const at = (start) => ({ ...state, offset: start });
  return { ...found, before: offset > 0 ? at(Math.max(offset - LIMIT, 0)) : null, after: found.next ? at(found.next) : null };
}

export async function showFilter(root, api, now, available) {
  const { h } = api;
  const usable = await relationsOf(api, now.part, available);
  const named = usable.find((one) => one.name === (now.relation ?? ROWS));
  const relation = named ?? usable[0];
  if (!relation) { root.replaceChildren(h("p", { class: "note" }, "There are no columns and no rows yet: run a partition first.")); return; }
  const isOfSamples = relation.name === SAMPLES;
  const example = isOfSamples ? relation.columns.find(([name]) => name.startsWith("size_"))?.[0] ?? "index" : "image_width";
  const condition = h("input", { type: "text", id: "where", value: now.where ?? "", placeholder: `${example} > 512`, spellcheck: "false", autocapitalize: "off", autocomplete: "off" });
  const state = { part: now.part, page: "filter", relation: relation.name === ROWS ? undefined : relation.name, where: now.where, order: now.order, direction: now.direction };
  const change = (changed) => api.go({ ...state, where: condition.value.trim(), ...changed });
  const columns = relation.columns.map(([name]) => [name, name]);
  const place = h("div", { id: "filtered" });
  root.replaceChildren(
    h("form", { class: "x-controls", onsubmit: (event) => { event.preventDefault(); change({}); } },
      usable.length > 1 ? choice(api, "Rows of", usable.map((one) => [one.name, one.name]), relation.name, (value) => change({ relation: value, order: "" })) : null,
      h("div", { class: "x-grow" }, field(api, "Condition (SQL)", condition)),
      choice(api, "Order by", [["", "sample"], ...columns], now.order ?? "", (value) => change({ order: value })),
      choice(api, "Direction", [["asc", "smallest first"], ["desc", "largest first"]], now.direction ?? "asc", (value) => change({ direction: value })),
      h("button", { type: "submit", class: "x-main" }, "Apply"),
      now.part && !now.part.startsWith("@") ? h("a", { class: "button", href: api.link({ ...state, part: undefined }) }, `only ${now.part} ✕`) : null),
    place);
  place.append(h("p", { class: "muted" }, isOfSamples ? "Looking…" : "Reading the tables, of very many partitions for some seconds…"));
  await fill(api, place, async () => {
    const offset = Number(now.offset ?? 0) || 0;
    const listed = { ...state, relation: relation.name, offset };
    const found = await filterPage(api, listed, { fresh: true });
    if (found.error) return queryError(api, found, now.where ?? "", condition);
    const [before, more] = [found.before, found.after].map((one) => one && api.link(one));
    const after = offset ? ` after the first ${plural(offset, isOfSamples ? "sample" : "row")}` : "";
    const said = found.entries.length ? `${plural(found.entries.length, "sample")}${after}${more ? ", and more" : ""}` : isOfSamples ? "No sample is such" : "No sample has such a row";
    say(said);
    const back = api.link(listed).slice(1);
    return [
      h("div", { class: "bar" }, h("span", { class: "x-grow muted" }, said), stepLink(api, "← Previous", before, "prev"), stepLink(api, "Next →", more, "next")),
      h("ol", { class: "grid", "aria-label": "Samples" }, ...found.entries.map((entry, at) => filteredCard(api, entry, found.rows[at], now.order, back))),
    ];
  });
}

function filteredCard(api, entry, row, order, back) {
  const { h } = api;
  const value = order && row.value !== null ? h("span", { class: "x-value" }, `${order}: ${typeof row.value === "number" ? short(row.value) : row.value}`) : null;
  if (entry.index < 0) {
    return h("li", {}, h("a", { class: "card x-lost", href: api.link({ page: "origin", partition: row.partition, sample_id: row.sample_id }) },
      h("div", { class: "thumb" }, "not packed"), h("div", { class: "words" }, h("span", { class: "id", title: entry.id }, entry.id), h("span", { class: "x-why" }, entry.note), value)));
  }
  const card = api.card(entry, entry.part, back);
  if (value) card.querySelector(".names").replaceWith(value); // a card has room for one of them
  return card;
}
