// What the exploring pages share: numbers in words, controls, and places that say what went wrong.

export const count = (number) => Number(number).toLocaleString("en-US");
export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
/** A number in few digits, from a thousand on in whole ones. */
export function short(value) {
  if (value === null || value === undefined) return "";
  const rounded = Number.isInteger(value) ? value : Number(value.toPrecision(4));
  return Number.isInteger(rounded) ? count(rounded) : String(rounded);
}
export const baseName = (path) => (path ?? "").split("/").pop();
export const say = (text) => { const said = document.getElementById("said"); if (said) said.textContent = text; };

export function bytesText(size) {
  if (size === null || size === undefined) return "";
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let value = size;
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit ? value.toPrecision(3) : value} ${units[unit]}`;
}

/** Stores a state in the URL without drawing the page again. */
export function keep(api, parameters, { push = false } = {}) {
  const target = api.link(parameters);
  if (new URL(target, location.href).href !== location.href) history[push ? "pushState" : "replaceState"]({}, "", target);
}

export function failure(api, error) {
  return api.h("p", { class: "note bad", role: "alert" }, error.message);
}

/** Draws into a place what a promise gives, and its error in words. */
export async function fill(api, place, work) {
  place.setAttribute("aria-busy", "true");
  try {
    const found = await work();
    if (found !== undefined) place.replaceChildren(...[found].flat().filter(Boolean));
  } catch (error) {
    place.replaceChildren(failure(api, error));
  } finally {
    place.removeAttribute("aria-busy");
  }
}

export function field(api, label, control) {
  return api.h("label", { class: "x-field" }, api.h("span", {}, label), control);
}

export function choice(api, label, options, chosen, onchange) {
  const { h } = api;
  return field(api, label, h("select", { onchange: (event) => onchange(event.target.value) },
    ...options.map(([value, title]) => h("option", { value, selected: value === chosen }, title))));
}

/** The URL of a sample, whose page returns to the one that is looked at. */
export const openLink = (api, partition, sampleId) => api.link({ page: "open", partition, sample_id: sampleId, back: location.search.slice(1) });

export function queryError(api, found, sql, editor) {
  const { h } = api;
  if (!found.line) { say(found.error); return [h("p", { class: "note bad", role: "alert" }, found.error)]; }
  const line = sql.split("\n")[found.line - 1] ?? "";
  const start = sql.split("\n").slice(0, found.line - 1).reduce((sum, one) => sum + one.length + 1, 0) + found.column - 1;
  const end = start + (/^\w+/.exec(sql.slice(start))?.[0].length ?? 1);
  if (document.activeElement === editor) editor.setSelectionRange(start, Math.min(end, sql.length));
  return [h("div", { class: "note bad", role: "alert" },
    h("p", {}, `Line ${found.line}, column ${found.column}: ${found.error}`),
    h("pre", { class: "x-where" }, `${line}\n${" ".repeat(Math.max(found.column - 1, 0))}^`))];
}

export function stepLink(api, title, target, rel) {
  return api.h("a", { class: "button", rel, ...(target ? { href: target } : { "aria-disabled": "true" }) }, title);
}
