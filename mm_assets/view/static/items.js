// Draws an item of a sample: `renderItem(item, context)` returns an element for every kind.
//
// Text is only ever set as text, never as markup. All players of a sample share `context.clock`, an EventTarget with two
// events: "time" (detail {seconds, name}: a player is there) and "seek" (detail {seconds}: go there). Plots, words,
// notes and frames follow the first and send the second. Seconds are of the sample, from its start.

import { element, button, clamp, urlOf, short, clockText, failure, say, follow, canvasOf, picture } from "./item_parts.js";
import { drawAudio, drawNotes, drawPlot, drawVideo } from "./item_players.js";

const SVG = "http://www.w3.org/2000/svg";

export function renderItem(item, context) {
  const draw = KINDS[item.kind] ?? drawUnknown;
  const root = element("div", { class: `mm-item mm-${item.kind}` });
  root.append(...[draw(item, context)].flat(3).filter(Boolean));
  return root;
}

// --- text, JSON, numbers ---------------------------------------------------------------------------------------------

function drawText(item, context) {
  if (Array.isArray(item.data.segments)) return drawSegments(item, context);
  return element("pre", { class: item.data.format === "plain" ? "mm-text" : "mm-text mm-code", tabindex: 0, "aria-label": item.name }, item.data.text ?? "");
}

function drawSegments(item, context) {
  const words = item.data.segments.map(([start, end, text]) =>
    element("button", { type: "button", class: "mm-word", title: `${clockText(start)} to ${clockText(end)}`,
      onclick: () => { say(context.clock, "seek", { seconds: start }); say(context.clock, "time", { seconds: start, name: item.name }); } },
    text || "·"));
  const box = element("div", { class: "mm-words", role: "group", "aria-label": `${item.name}: texts with times` }, words);
  follow(context.clock, box, (seconds) => {
    item.data.segments.forEach(([start, end], place) => {
      const isNow = seconds >= start && (seconds < end || seconds === start);
      const word = words[place];
      if (isNow === word.classList.contains("mm-now")) return;
      word.classList.toggle("mm-now", isNow);
      if (isNow) word.setAttribute("aria-current", "true");
      else word.removeAttribute("aria-current");
      if (isNow && (word.offsetTop < box.scrollTop || word.offsetTop + word.offsetHeight > box.scrollTop + box.clientHeight)) box.scrollTop = word.offsetTop - 8;
    });
  });
  return box;
}

function drawScalar(item) {
  return element("p", { class: "mm-scalar" }, item.data.text);
}

function tree(value, key, depth) {
  const name = key === null ? [] : [element("span", { class: "mm-key" }, String(key)), ": "];
  if (value === null || typeof value !== "object") {
    const kind = value === null ? "null" : typeof value;
    return element("div", { class: "mm-leaf" }, ...name, element("span", { class: `mm-value mm-${kind}` }, kind === "string" ? value : JSON.stringify(value)));
  }
  const entries = Array.isArray(value) ? value.map((one, place) => [place, one]) : Object.entries(value);
  const brackets = Array.isArray(value) ? `[${entries.length}]` : `{${entries.length}}`;
  const node = element("details", { class: "mm-tree" }, element("summary", {}, ...name, element("span", { class: "mm-count" }, brackets)));
  const fill = () => { // not before it is opened: a tree may have ten thousand nodes
    if (node.open && node.childElementCount === 1) node.append(element("div", { class: "mm-children" }, entries.map(([one, child]) => tree(child, one, depth + 1))));
  };
  node.addEventListener("toggle", fill);
  if (depth === 0 || (depth === 1 && entries.length <= 12)) { node.open = true; fill(); }
  return node;
}

function drawJSON(item, context) {
  const { pages, segments, value } = item.data;
  return [pages ? drawPage(item, context) : null, segments ? drawSegments(item, context) : null, tree(value, null, pages || segments ? 1 : 0)];
}

function drawUnknown(item) {
  return item.data && Object.keys(item.data).length ? tree(item.data, null, 0) : null;
}

function drawTokens(item) {
  const { ids, text, pieces, text_note: note, frequent, histogram } = item.data;
  return [
    text === undefined ? null : element("p", { class: "mm-text" }, text),
    note ? failure(note) : null,
    element("ol", { class: "mm-ids", tabindex: 0, "aria-label": "Token ids" }, ids.map((id, place) =>
      element("li", {}, pieces?.[place] ? element("span", { class: "mm-piece" }, pieces[place]) : null, element("span", { class: "mm-id" }, String(id))))),
    frequent?.length ? element("details", { class: "mm-counts" }, element("summary", {}, "How often"), idHistogram(histogram), frequentIds(frequent)) : null,
  ];
}

function idHistogram({ low, high, counts }) {
  const most = Math.max(...counts);
  const label = `Tokens by id, from ${low} to ${high}; at most ${most} in one of ${counts.length} parts of the range`;
  const bars = canvasOf(64, (pen, width, height, colours) => {
    pen.fillStyle = colours.accent;
    const step = width / counts.length;
    counts.forEach((count, place) => { // whatever is there at all is seen
      const tall = count ? Math.max(2, (count / most) * (height - 1)) : 0;
      pen.fillRect(place * step, height - tall, Math.max(1, step - 1), tall);
    });
    pen.fillStyle = colours.line;
    pen.fillRect(0, height - 1, width, 1);
  }, { role: "img", "aria-label": label });
  return element("figure", { class: "mm-histogram" }, bars, element("figcaption", { class: "mm-legend" }, element("span", {}, `id ${low}`), element("span", {}), element("span", {}, `${high}`)));
}

function frequentIds(frequent) {
  const most = frequent[0][1];
  return element("table", { class: "mm-frequent" }, element("thead", {}, element("tr", {}, ["id", "count"].map((name) => element("th", { scope: "col" }, name)))),
    element("tbody", {}, frequent.map(([id, count, piece]) => {
      const share = element("span", { class: "mm-share", "aria-hidden": "true" });
      share.style.width = `${(100 * count) / most}%`;
      return element("tr", {}, element("td", {}, String(id), piece ? [" ", element("span", { class: "mm-piece" }, piece)] : null), element("td", {}, element("span", {}, count.toLocaleString("en-US")), share));
    })));
}

// --- pictures --------------------------------------------------------------------------------------------------------

const SMALL = 128; // pixels on a side

function zoomable(image, label, over = null) {
  // Click or Enter enlarges at that point; + and - enlarge and shrink, 0 fits it into its place again.
  let scale = 0; // 0: fitted
  const canvas = element("div", { class: "mm-zoomed" }, image, over);
  const view = element("div", { class: "mm-zoom", tabindex: 0, role: "group", "aria-label": `${label}. Enlarge with + and -, 0 fits it.` }, canvas);
  const sides = ["width", "height"].map((name) => Number(image.getAttribute(name)));
  if (Math.min(...sides) > 0 && Math.max(...sides) <= SMALL) view.classList.add("mm-small"); // drawn larger
  let fitting = 1; // the scale at which it was fitted last
  const fitted = () => {
    if (scale === 0 && image.naturalWidth) fitting = image.clientWidth / image.naturalWidth;
    return fitting;
  };
  const set = (wanted, at = null) => {
    const before = scale || fitted();
    const next = wanted === 0 ? 0 : clamp(wanted, 0.05, 16);
    const box = canvas.getBoundingClientRect();
    const part = at ? [(at.clientX - box.left) / box.width, (at.clientY - box.top) / box.height] : [0.5, 0.5];
    scale = next !== 0 && Math.abs(next - fitted()) < 0.01 ? 0 : next;
    view.classList.toggle("mm-is-zoomed", scale !== 0);
    canvas.style.width = scale === 0 ? "" : `${Math.round((image.naturalWidth || 256) * scale)}px`;
    if (scale !== 0 && scale !== before) {
      view.scrollLeft = part[0] * canvas.offsetWidth - view.clientWidth / 2;
      view.scrollTop = part[1] * canvas.offsetHeight - view.clientHeight / 2;
    }
    level.textContent = scale === 0 ? "fit" : `${Math.round(scale * 100)} %`;
  };
  const step = (factor) => set((scale || fitted()) * factor);
  const level = element("output", { class: "mm-level" }, "fit");
  canvas.addEventListener("click", (event) => set(scale === 0 ? Math.max(1, fitted() * 2.5) : 0, event));
  view.addEventListener("keydown", (event) => {
    const act = { "+": () => step(1.5), "=": () => step(1.5), "-": () => step(1 / 1.5), 0: () => set(0), Enter: () => set(scale === 0 ? Math.max(1, fitted() * 2.5) : 0) }[event.key];
    const isScroll = scale !== 0 && event.key.startsWith("Arrow");
    if (act) { event.preventDefault(); act(); }
    if (act || isScroll) event.stopPropagation();
  });
  const bar = element("div", { class: "mm-bar mm-zoom-bar" }, button("−", "Smaller", () => step(1 / 1.5)), level, button("+", "Larger", () => step(1.5)), button("1:1", "Pixel for pixel", () => set(1)), button("Fit", "Fit into the page", () => set(0)));
  return element("div", { class: "mm-figure" }, view, bar);
}

function drawImage(item) {
  return [
    zoomable(picture(urlOf(item, item.data.image), item.data.caption || item.name, item.data), item.name),
    item.data.caption ? element("p", { class: "mm-text" }, item.data.caption) : null,
    item.data.tokens?.ids?.length ? element("details", {}, element("summary", {}, `${item.data.tokens.ids.length} tokens`), drawTokens({ data: item.data.tokens })) : null,
  ];
}

function drawImages(item, context) {
  return framesView(item, item.data.frames, (frame) => (frame.media ? zoomable(picture(urlOf(item, frame.media), `${item.name}, ${frame.position}`, frame), item.name) : failure(frame.note || "This one cannot be shown.")), context);
}

function framesView(item, frames, draw, context) {
  const holder = element("div", { class: "mm-frame" });
  const count = frames.length;
  const where = element("output", { class: "mm-level" });
  const slider = element("input", { type: "range", min: 0, max: Math.max(0, count - 1), value: 0, "aria-label": `${item.name}: frame`, class: "mm-slider" });
  const show = (number) => {
    const place = clamp(number, 0, count - 1);
    slider.value = String(place);
    slider.setAttribute("aria-valuetext", `${place + 1} of ${count}`);
    where.textContent = `${place + 1} of ${count}`;
    holder.replaceChildren(draw(frames[place], place));
  };
  slider.addEventListener("input", () => show(Number(slider.value)));
  slider.addEventListener("keydown", (event) => event.stopPropagation());
  const bar = element("div", { class: "mm-bar" }, button("‹", "The one before", () => show(Number(slider.value) - 1)), slider, button("›", "The next one", () => show(Number(slider.value) + 1)), where);
  if (item.data.animation) bar.append(button("▶", "Show it moving", () => holder.replaceChildren(picture(urlOf(item, item.data.animation), item.name))));
  if (!count) return null;
  show(0);
  return [holder, count > 1 || item.data.animation ? bar : null];
}

function drawDepth(item) {
  const { low, high, unit, colours } = item.data;
  const scale = element("div", { class: "mm-scale", role: "img", "aria-label": `Colours from ${short(low)} to ${short(high)} ${unit}` });
  scale.style.background = `linear-gradient(to right, ${colours.join(", ")})`;
  return [
    zoomable(picture(urlOf(item, item.data.image), item.name, item.data), item.name),
    element("div", { class: "mm-legend" }, element("span", {}, `${short(low)} ${unit}`), scale, element("span", {}, `${short(high)} ${unit}`)),
  ];
}

function drawArray(item, context) {
  const { first, more, plot, image } = item.data;
  return [
    plot ? drawPlot(item, context, { axis: "index" }) : null,
    image ? zoomable(picture(urlOf(item, image), `${item.name}, first plane`, item.data), item.name) : null,
    first.length ? element("p", { class: "mm-numbers" }, first.join("  ") + (more ? `  … ${more.toLocaleString()} more` : "")) : null,
  ];
}

// --- documents and pages ---------------------------------------------------------------------------------------------

function drawDocument(item, context) {
  const blocks = item.data.blocks.map((block) => [block.position, drawBlock(item, block, context)]);
  for (const other of context.items) { // images at positions between those of the texts
    if (other.kind !== "images" || other.data.over !== item.name || item.data.value !== undefined) continue;
    for (const frame of other.data.frames) {
      if (frame.media) blocks.push([frame.position, zoomable(picture(urlOf(other, frame.media), `${other.name}, ${frame.position}`, frame), other.name)]);
    }
  }
  blocks.sort((one, two) => one[0] - two[0]);
  const rest = item.data.value && Object.keys(item.data.value).length ? tree(item.data.value, null, 1) : null;
  return [element("article", { class: "mm-blocks", tabindex: 0, "aria-label": `${item.name} in reading order` }, blocks.map(([, node]) => node)), rest];
}

function drawBlock(item, block, context) {
  if (block.kind === "text" && !block.data?.segments) return element("p", { class: "mm-text" }, block.data.text);
  if (block.kind === "picture") {
    const owner = block.picture ? context.items.find((one) => one.name === block.picture.item) : null;
    const url = owner ? urlOf(owner, block.picture.media) : null;
    return url ? element("figure", {}, zoomable(picture(url, block.label), block.label), element("figcaption", {}, block.label)) : failure(`${block.label}: the sample has no such image.`);
  }
  const media = item.media.filter((one) => one.name.startsWith(block.prefix)).map((one) => ({ ...one, name: one.name.slice(block.prefix.length) }));
  const inner = { ...block, name: `${item.name} ${block.position}`, media };
  return element("section", { class: "mm-block" }, block.note ? failure(block.note) : null, renderItem(inner, { ...context, clock: new EventTarget() }));
}

const hueOf = (labels, label) => Math.round(210 + 137.5 * labels.indexOf(label)) % 360; // far from those before it

function boxesOver(page, toggles, labels) {
  const layer = element("div", { class: "mm-boxes", "aria-hidden": "true" });
  page.boxes.forEach(([left, top, right, bottom, text, label, kind]) => {
    const box = element("div", { class: `mm-box mm-box-${kind}`, title: label ? `${label}: ${text}` : text });
    Object.assign(box.style, { left: `${100 * left}%`, top: `${100 * top}%`, width: `${100 * (right - left)}%`, height: `${100 * (bottom - top)}%` });
    if (label) box.style.setProperty("--mm-hue", hueOf(labels, label));
    if (label && kind === "segment") box.append(element("span", { class: "mm-box-label" }, label));
    layer.append(box);
  });
  if (page.links.length) {
    const lines = document.createElementNS(SVG, "svg");
    lines.setAttribute("viewBox", "0 0 1000 1000");
    lines.setAttribute("preserveAspectRatio", "none");
    lines.setAttribute("class", "mm-links");
    for (const [from, to] of page.links) {
      const line = document.createElementNS(SVG, "line");
      const [one, two] = [page.boxes[from], page.boxes[to]];
      for (const [name, value] of [["x1", one[0] + one[2]], ["y1", one[1] + one[3]], ["x2", two[0] + two[2]], ["y2", two[1] + two[3]]]) line.setAttribute(name, String(500 * value));
      line.setAttribute("vector-effect", "non-scaling-stroke");
      lines.append(line);
    }
    layer.append(lines);
  }
  for (const [name, on] of toggles) layer.classList.toggle(`mm-no-${name}`, !on);
  return layer;
}

function drawPage(item, context) {
  const all = item.data.pages.flatMap((page) => page.boxes ?? []);
  const has = (kind) => all.some((box) => box[6] === kind);
  const labels = [...new Set(all.map((box) => box[5]).filter(Boolean))];
  const toggles = new Map([["words", !has("segment")], ["segments", true], ["labels", false], ["links", true]]);
  const root = element("div", { class: "mm-pages" });
  const toggle = (name, label) => element("label", { class: "mm-toggle" }, element("input", {
    type: "checkbox", checked: toggles.get(name),
    onchange: (event) => { toggles.set(name, event.target.checked); root.querySelectorAll(".mm-boxes").forEach((layer) => layer.classList.toggle(`mm-no-${name}`, !event.target.checked)); },
  }), label);
  const draw = (page) => {
    const owner = page.item ? context.items.find((one) => one.name === page.item) : item;
    const url = owner ? urlOf(owner, page.item ? owner.data.image : page.media) : null;
    const size = page.item && owner ? owner.data : page;
    const over = page.boxes ? boxesOver(page, toggles, labels) : null;
    if (url) return zoomable(picture(url, `${item.name}, page ${page.position ?? 0}`, size), item.name, over);
    const sheet = element("div", { class: "mm-sheet" }, over);
    if (page.shape) sheet.style.aspectRatio = `${page.shape[0]} / ${page.shape[1]}`;
    return page.note && !over ? failure(page.note) : sheet;
  };
  const words = item.data.pages.flatMap((page) => (page.boxes ?? []).filter((box) => box[6] === (has("segment") ? "segment" : "word")));
  root.append(
    element("div", { class: "mm-bar" }, has("word") ? toggle("words", "Words") : null, has("segment") ? toggle("segments", "Segments") : null,
      labels.length && has("segment") ? toggle("labels", "Labels") : null, item.data.pages.some((page) => page.links?.length) ? toggle("links", "Links") : null),
    labels.length ? element("p", { class: "mm-labels", "aria-label": "Colours of the labels" }, labels.slice(0, 24).map((label) => {
      const mark = element("span", { class: "mm-label" }, label);
      mark.style.setProperty("--mm-hue", hueOf(labels, label));
      return mark;
    })) : "",
    ...[framesView({ name: item.name, data: {} }, item.data.pages, draw, context)].flat().filter(Boolean),
    words.length ? element("details", {}, element("summary", {}, `Text of ${words.length} boxes`), element("ul", { class: "mm-box-list" }, words.map((box) => element("li", {}, box[5] ? element("b", {}, `${box[5]} `) : null, element("span", {}, box[4]))))) : "",
  );
  if (item.data.fields && Object.keys(item.data.fields).length) root.append(tree(item.data.fields, "fields", 0));
  return root;
}

const KINDS = {
  text: drawText,
  json: drawJSON,
  scalar: drawScalar,
  tokens: drawTokens,
  image: drawImage,
  images: drawImages,
  depth: drawDepth,
  array: drawArray,
  document: drawDocument,
  page: drawPage,
  audio: drawAudio,
  video: drawVideo,
  series: drawPlot,
  midi: drawNotes,
  absent: () => null,
  unreadable: () => null,
};
