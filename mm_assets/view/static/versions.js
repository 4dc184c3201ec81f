// The versions of a dataset: two of them compared, and what became of one sample, side by side.

import { bytesText, choice, count, failure, fill, openLink, plural, say } from "./explore_tools.js";

const dateText = (seconds) => (seconds ? new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ") : "");

export async function showVersions(root, api, now) {
  const { h } = api;
  const { versions } = await api.get("api/explore/versions");
  if (!versions.length) { root.replaceChildren(h("p", { class: "note" }, "There is no manifest yet.")); return; }
  const of = (name, fallback) => versions.find((version) => version.digest === name) ?? fallback;
  const [next, last] = [of(now.new, versions[0]), of(now.old, versions[1] ?? versions[0])];
  const change = (changed) => api.go({ part: now.part, page: "versions", old: last.digest, new: next.digest, ...changed });
  const options = versions.map((version) => [version.digest, `${version.digest.slice(0, 12)} · ${dateText(version.modified)}${version.is_newest ? " · newest" : ""}`]);
  const facts = (version) => h("dl", { class: "facts x-facts" }, ...[["samples", count(version.num_samples)], ["partitions", count(version.num_partitions)], ["packed files", bytesText(version.num_bytes)], ["written", dateText(version.modified)]]
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  const place = h("div", { id: "diff" });
  root.replaceChildren(
    h("div", { class: "x-two" },
      h("section", { class: "item", "aria-label": "Old version" }, choice(api, "From", options, last.digest, (value) => change({ old: value })), facts(last)),
      h("section", { class: "item", "aria-label": "New version" }, choice(api, "To", options, next.digest, (value) => change({ new: value })), facts(next))),
    place);
  if (versions.length < 2) { place.replaceChildren(h("p", { class: "muted" }, "There is one version: the next one can be compared with it.")); return; }
  if (last.digest === next.digest) { place.replaceChildren(h("p", { class: "muted" }, "Choose two versions.")); return; }
  await fill(api, place, () => diffOf(api, last.digest, next.digest));
}

async function diffOf(api, last, next) {
  const { h } = api;
  const rows = h("tbody", {});
  const sums = { added: 0, removed: 0, changed: 0 };
  const said = h("p", { id: "diff-said", role: "status" });
  const more = h("button", { type: "button" }, "Compare further partitions");
  let offset = 0;
  async function load() {
    more.disabled = true;
    const found = await api.get("api/explore/diff", { old: last, new: next, offset });
    for (const partition of found.partitions) {
      for (const change of Object.keys(sums)) sums[change] += partition.counts?.[change] ?? 0;
      rows.append(...partitionRows(api, partition, last, next));
    }
    offset = found.next;
    more.hidden = offset === null;
    more.disabled = false;
    said.textContent = `${count(sums.added)} added, ${count(sums.removed)} removed, ${count(sums.changed)} changed${offset === null ? "" : " so far"}; ${plural(found.unchanged, "partition")} the same, ${plural(found.total, "partition")} with other files.`;
    say(said.textContent);
    return found;
  }
  more.addEventListener("click", () => load().catch((error) => { said.replaceChildren(failure(api, error)); more.disabled = false; }));
  const first = await load();
  return [
    first.settings.length ? h("section", { "aria-label": "Settings" }, h("h2", {}, "Settings and schema"), h("ul", {}, ...first.settings.map((one) => h("li", {}, one)))) : h("p", { class: "muted" }, "Settings and schema are the same."),
    said,
    first.total ? h("div", { class: "scroll x-table", tabindex: "0", role: "region", "aria-label": "Partitions that differ" }, h("table", {},
      h("thead", {}, h("tr", {}, ...["partition", "state", "samples", "added", "removed", "changed", "why"].map((name, at) => h("th", { scope: "col", class: at > 1 && at < 6 ? "number" : undefined }, name)))), rows)) : null,
    more,
  ];
}

function partitionRows(api, partition, last, next) {
  const { h } = api;
  const key = partition.partition;
  const inner = h("td", { colspan: "7" });
  const hidden = h("tr", { hidden: true }, inner);
  const number = (change) => h("td", { class: "number" }, partition.counts ? count(partition.counts[change]) : "?");
  const toggle = h("button", { type: "button", class: "x-plain", "aria-expanded": "false" }, `▸ ${key}`);
  toggle.addEventListener("click", () => {
    const opens = hidden.hidden;
    hidden.hidden = !opens;
    toggle.setAttribute("aria-expanded", String(opens));
    toggle.textContent = `${opens ? "▾" : "▸"} ${key}`;
    if (opens && !inner.childNodes.length) fill(api, inner, () => changedSamples(api, key, last, next, 0));
  });
  return [h("tr", {}, h("td", {}, partition.counts ? toggle : key), h("td", {}, partition.state),
    h("td", { class: "number" }, `${count(partition.num_old)} → ${count(partition.num_new)}`), number("added"), number("removed"), number("changed"),
    h("td", {}, [...partition.reasons, partition.note].filter(Boolean).join("; "))), hidden];
}

const SIGN = { added: "+", removed: "−", changed: "≠" };

async function changedSamples(api, partition, last, next, offset) {
  const { h } = api;
  const found = await api.get("api/explore/diff/samples", { old: last, new: next, partition, offset });
  const list = h("ul", { class: "x-changes" }, ...found.samples.map((sample) => {
    const compared = !api.about().has_versions ? null : api.link({ page: "compare", old: last, new: next, partition, sample_id: sample.sample_id });
    const target = { removed: api.link({ page: "origin", partition, sample_id: sample.sample_id }), added: openLink(api, partition, sample.sample_id), changed: compared ?? openLink(api, partition, sample.sample_id) }[sample.change];
    const why = [sample.reason, sample.detail].filter(Boolean).join(": ");
    return h("li", { class: `x-${sample.change}` }, h("span", { class: "x-sign", title: sample.change }, SIGN[sample.change]), h("span", { class: "out-of-sight" }, sample.change), " ",
      h("a", { href: target }, sample.sample_id), sample.modalities.length ? ` (${sample.modalities.join(", ")})` : "", h("span", { class: "muted" }, ` ${why}`),
      compared && sample.change === "removed" ? [" ", h("a", { href: compared, "aria-label": `What ${sample.sample_id} was` }, "what it was")] : null);
  }));
  if (found.next === null) return list;
  const more = h("button", { type: "button", onclick: () => { const place = h("div", {}); more.replaceWith(place); fill(api, place, () => changedSamples(api, partition, last, next, found.next)); } }, "More samples");
  return [list, more];
}

// --- one sample ---------------------------------------------------------------------------------------------------

const STATES = { differs: "differs", old: "only in the old version", new: "only in the new version", unknown: "of the same size, not compared: the files have no checksums", same: "the same" };

/** A sample of two versions: each modality of both beside each other, or below where there is no room. */
export async function showCompared(root, api, now) {
  const { h } = api;
  const place = h("div", { id: "compared" }, h("p", { class: "muted" }, "Looking for the sample…"));
  root.replaceChildren(
    h("div", { class: "bar" }, h("a", { class: "button", href: api.link({ page: "versions", old: now.old, new: now.new }) }, "↑ Versions"),
      h("h2", { class: "x-grow" }, now.sample_id), h("span", { class: "muted" }, `partition ${now.partition}`)), place);
  document.title = now.sample_id;
  await fill(api, place, async () => {
    const found = await api.get("api/explore/compare", { old: now.old, new: now.new, partition: now.partition, sample_id: now.sample_id });
    const sides = await Promise.all(["old", "new"].map(async (side) => {
      const { part, n } = found[side];
      return { side, part, n, drawn: n === null ? null : api.itemSections((await api.get(`api/sample/${n}`, { part })).items, side) };
    }));
    const order = Object.keys(STATES);
    const names = Object.keys(found.states).sort((one, two) => order.indexOf(found.states[one]) - order.indexOf(found.states[two]));
    const numbers = order.map((state) => [state, names.filter((name) => found.states[name] === state).length]).filter(([, number]) => number);
    const said = numbers.map(([state, number]) => `${number} ${STATES[state].split(",")[0].replace("differs", number === 1 ? "differs" : "differ")}`).join(", ");
    say(said);
    const head = ({ side, part, n }) => h("section", { class: "item", "aria-label": side === "old" ? "Old version" : "New version" },
      h("strong", {}, side === "old" ? "Old" : "New"), ` ${part.slice(1, 13)} `, n === null ? h("span", { class: "muted" }, "does not have the sample") : h("a", { href: api.link({ part, n }) }, "open"));
    const pairs = names.map((name) => h("details", { class: `x-pair x-pair-${found.states[name]}`, open: found.states[name] !== "same" },
      h("summary", {}, h("strong", {}, name), ` ${STATES[found.states[name]]}`),
      h("div", { class: "x-two" }, ...sides.map(({ side, drawn }) => drawn?.sections.find((section) => section.dataset.name === name) ?? h("p", { class: "muted item" }, `Not in the ${side} version.`)))));
    place.replaceChildren(h("p", { id: "compared-said" }, said), h("div", { class: "x-two" }, ...sides.map(head)), ...pairs);
    for (const { drawn } of sides) drawn?.draw();
    return undefined;
  });
}
