// Draws an item of a sample: `renderItem(item, context)` returns an element for every kind.
//
// Text is only ever set as text, never as markup. All players of a sample share `context.clock`, an EventTarget with two
// events: "time" (detail {seconds, name}: a player is there) and "seek" (detail {seconds}: go there). Plots, words,
// notes and frames follow the first and send the second. Seconds are of the sample, from its start.

const SVG = "http://www.w3.org/2000/svg";
const MAX_ROWS = 8; // of plots and of notes, that are shown at first

export function renderItem(item, context) {
  const draw = KINDS[item.kind] ?? drawUnknown;
  const root = element("div", { class: `mm-item mm-${item.kind}` });
  root.append(...[draw(item, context)].flat(3).filter(Boolean));
  return root;
}

// --- elements --------------------------------------------------------------------------------------------------------

function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function button(label, title, onclick) {
  return element("button", { type: "button", class: "mm-button", title, "aria-label": title, onclick }, label);
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const mediaOf = (item, name) => item.media.find((one) => one.name === name) ?? null;
const urlOf = (item, name) => mediaOf(item, name)?.url ?? null;

function short(value) {
  if (value === null || value === undefined) return "—";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : Number(value.toPrecision(4)).toString();
}

function clockText(seconds) {
  const whole = Math.max(0, seconds);
  const minutes = Math.floor(whole / 60);
  return `${minutes}:${(whole - 60 * minutes).toFixed(whole < 60 ? 2 : 0).padStart(whole < 60 ? 5 : 2, "0")}`;
}

function failure(text) {
  return element("p", { class: "mm-failure", role: "note" }, text);
}

// --- the clock -------------------------------------------------------------------------------------------------------

const say = (clock, kind, detail) => clock?.dispatchEvent(new CustomEvent(kind, { detail }));

function follow(clock, node, react) {
  // The listener lives as long as its node is on the page.
  const listener = (event) => {
    if (node.isConnected) react(event.detail.seconds, event.detail.name);
    else if (node.dataset.seen) clock.removeEventListener("time", listener);
    if (node.isConnected) node.dataset.seen = "1";
  };
  clock?.addEventListener("time", listener);
}

function driveBy(player, item, context, { start = 0, end = Infinity, offset = 0 } = {}) {
  // A media element as a player of the clock: its second `start` is second `offset` of the sample.
  const { clock } = context;
  const tell = () => say(clock, "time", { seconds: player.currentTime - start + offset, name: item.name });
  let frame = 0;
  const tick = () => {
    tell();
    if (player.currentTime >= end) player.pause();
    if (!player.paused && player.isConnected) frame = requestAnimationFrame(tick);
  };
  player.addEventListener("play", () => {
    say(clock, "play", { player });
    cancelAnimationFrame(frame);
    tick();
  });
  for (const kind of ["seeked", "pause", "timeupdate"]) player.addEventListener(kind, tell);
  player.addEventListener("loadedmetadata", () => { if (start > 0 && player.currentTime < start) player.currentTime = start; });
  clock?.addEventListener("play", (event) => { if (event.detail.player !== player && !player.dataset.follows) player.pause(); });
  clock?.addEventListener("seek", (event) => {
    const at = event.detail.seconds - offset + start;
    if (at >= 0 && (!Number.isFinite(player.duration) || at <= player.duration + 0.5)) player.currentTime = at;
  });
}

// --- canvases --------------------------------------------------------------------------------------------------------

const drawings = new Set(); // weak references: a canvas that has left the page is not kept

function redrawAll() {
  for (const reference of drawings) {
    const redraw = reference.deref();
    if (redraw) redraw();
    else drawings.delete(reference);
  }
}

if (typeof document !== "undefined") {
  new MutationObserver(redrawAll).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
}

function canvasOf(height, draw, properties = {}) {
  // A canvas as wide as its place; `draw(context, width, height, colours)` is called whenever its size or theme changes.
  const canvas = element("canvas", { class: "mm-canvas", ...properties });
  canvas.style.height = `${height}px`;
  const redraw = () => {
    const width = canvas.clientWidth;
    if (!width) return;
    const scale = Math.min(window.devicePixelRatio || 1, 16000 / width);
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const colour = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
    pen.font = `12px ${style.fontFamily}`;
    draw(pen, width, height, {
      ink: colour("--ink", style.color),
      muted: colour("--muted", "#777"),
      line: colour("--line", "#ccc"),
      accent: colour("--accent", "#1f5fc4"),
    });
  };
  new ResizeObserver(redraw).observe(canvas);
  canvas.redraw = redraw;
  drawings.add(new WeakRef(redraw));
  return canvas;
}

function timeline(canvas, item, context, { span, label, from = 0, left = 0, right = 0, wide = false }) {
  // A canvas with a playhead: a click seeks, and so do the arrow keys; it moves with the clock.
  const head = element("div", { class: "mm-playhead", "aria-hidden": "true" });
  const area = element("div", {
    class: wide ? "mm-timeline mm-wide" : "mm-timeline", tabindex: 0, role: "slider", "aria-label": label,
    "aria-valuemin": short(from), "aria-valuemax": short(from + span), "aria-valuenow": short(from),
    "aria-valuetext": clockText(from),
  }, canvas, head);
  let now = from;
  const place = (seconds) => {
    now = clamp(seconds, from, from + span);
    const width = canvas.clientWidth - left - right;
    head.style.transform = `translateX(${left + (span ? (now - from) / span : 0) * width}px)`;
    area.setAttribute("aria-valuenow", short(now));
    area.setAttribute("aria-valuetext", clockText(now));
    area.classList.toggle("mm-outside", seconds < from - 0.01 || seconds > from + span + 0.01);
  };
  const seek = (seconds) => {
    place(seconds);
    say(context.clock, "seek", { seconds: now });
    say(context.clock, "time", { seconds: now, name: item.name });
  };
  area.addEventListener("pointerdown", (event) => {
    const box = canvas.getBoundingClientRect();
    const width = canvas.clientWidth - left - right;
    if (event.button === 0 && width > 0) seek(from + ((event.clientX - box.left - left) / width) * span);
  });
  area.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -span / 50, ArrowRight: span / 50, PageUp: -span / 10, PageDown: span / 10 }[event.key];
    const at = { Home: from, End: from + span }[event.key];
    if (step === undefined && at === undefined) return;
    event.preventDefault();
    event.stopPropagation(); // the page turns samples with the arrows
    seek(at ?? now + step);
  });
  new ResizeObserver(() => place(now)).observe(canvas);
  follow(context.clock, area, place);
  area.place = place;
  return area;
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
  return [item.data.pages ? drawPage(item, context) : null, tree(item.data.value, null, item.data.pages ? 1 : 0)];
}

function drawUnknown(item) {
  return item.data && Object.keys(item.data).length ? tree(item.data, null, 0) : null;
}

function drawTokens(item) {
  const { ids, text, pieces, text_note: note } = item.data;
  return [
    text === undefined ? null : element("p", { class: "mm-text" }, text),
    note ? failure(note) : null,
    element("ol", { class: "mm-tokens", "aria-label": "Token ids" }, ids.map((id, place) =>
      element("li", {}, pieces?.[place] ? element("span", { class: "mm-piece" }, pieces[place]) : null, element("span", { class: "mm-id" }, String(id))))),
  ];
}

// --- pictures --------------------------------------------------------------------------------------------------------

function picture(url, alt, size = {}) {
  const image = element("img", { src: url, alt, loading: "lazy", decoding: "async", width: size.width, height: size.height });
  image.addEventListener("error", () => image.replaceWith(failure("This picture cannot be decoded.")), { once: true });
  return image;
}

function zoomable(image, label, over = null) {
  // Click or Enter enlarges at that point; + and - enlarge and shrink, 0 fits it into its place again.
  let scale = 0; // 0: fitted
  const canvas = element("div", { class: "mm-zoomed" }, image, over);
  const view = element("div", { class: "mm-zoom", tabindex: 0, role: "group", "aria-label": `${label}. Enlarge with + and -, 0 fits it.` }, canvas);
  const fitted = () => (image.naturalWidth ? Math.min(1, view.clientWidth / image.naturalWidth) : 1);
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

function hue(label) {
  let sum = 0;
  for (const letter of label) sum = (sum * 31 + letter.codePointAt(0)) % 360;
  return sum;
}

function boxesOver(page, toggles) {
  const layer = element("div", { class: "mm-boxes", "aria-hidden": "true" });
  page.boxes.forEach(([left, top, right, bottom, text, label, kind]) => {
    const box = element("div", { class: `mm-box mm-box-${kind}`, title: label ? `${label}: ${text}` : text });
    Object.assign(box.style, { left: `${100 * left}%`, top: `${100 * top}%`, width: `${100 * (right - left)}%`, height: `${100 * (bottom - top)}%` });
    if (label) box.style.setProperty("--mm-hue", hue(label));
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
    const over = page.boxes ? boxesOver(page, toggles) : null;
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
      mark.style.setProperty("--mm-hue", hue(label));
      return mark;
    })) : "",
    ...[framesView({ name: item.name, data: {} }, item.data.pages, draw, context)].flat().filter(Boolean),
    words.length ? element("details", {}, element("summary", {}, `Text of ${words.length} boxes`), element("ul", { class: "mm-box-list" }, words.map((box) => element("li", {}, box[5] ? element("b", {}, `${box[5]} `) : null, box[4])))) : "",
  );
  if (item.data.fields && Object.keys(item.data.fields).length) root.append(tree(item.data.fields, "fields", 0));
  return root;
}

// --- audio and video -------------------------------------------------------------------------------------------------

async function waveform(pen, width, height, colours, peaks, part) {
  const middle = height / 2;
  pen.fillStyle = colours.line;
  pen.fillRect(0, middle, width, 1);
  pen.fillStyle = colours.accent;
  const step = (width * part) / peaks.length;
  peaks.forEach(([low, high], place) => pen.fillRect(place * step, middle - high * middle, Math.max(1, step * 0.9), Math.max(1, (high - low) * middle)));
}

function soundPlayer(item, sound, context, { follows = false } = {}) {
  // `sound` is the data of an audio item; `item` has its media.
  const media = mediaOf(item, sound.audio);
  const player = element("audio", { controls: true, preload: "metadata", src: media.url, "aria-label": item.name });
  player.addEventListener("error", () => {
    const made = sound.fallback ? urlOf(item, sound.fallback) : null;
    if (made && player.src !== new URL(made, location.href).href) player.src = made;
    else player.replaceWith(failure("This browser cannot play the audio."));
  });
  if (follows) player.dataset.follows = "1";
  else driveBy(player, item, context, { offset: sound.offset ?? 0 });
  const span = sound.duration || 1;
  let peaks = null;
  const canvas = canvasOf(72, (pen, width, height, colours) => { if (peaks) waveform(pen, width, height, colours, peaks.peaks, Math.min(1, peaks.seconds / span)); });
  const area = timeline(canvas, item, context, { span, from: sound.offset ?? 0, label: `Position in ${item.name}` });
  const address = sound.peaks ? urlOf(item, sound.peaks) : null;
  if (address) {
    fetch(address).then((answer) => (answer.ok ? answer.json() : Promise.reject(new Error(String(answer.status))))).then((found) => { peaks = found; canvas.redraw(); })
      .catch(() => area.replaceWith(failure("The waveform cannot be made: the audio is damaged.")));
  }
  return [area.isConnected || address ? area : null, player];
}

function drawAudio(item, context) {
  return [soundPlayer(item, item.data, context), lyricsOver(item, context)];
}

function lyricsOver(item, context) {
  const names = context.items.filter((one) => one.data.over === item.name && one.data.segments).map((one) => one.name);
  return names.length ? element("p", { class: "mm-hint" }, `${names.join(", ")} follow${names.length === 1 ? "s" : ""} this.`) : null;
}

function drawVideo(item, context) {
  const { data } = item;
  const clip = data.clip ?? { start: 0, duration: data.duration || Infinity };
  if (!data.playable) return drawStrip(item, context);
  const player = element("video", { controls: true, preload: "metadata", playsinline: true, src: urlOf(item, data.video), poster: data.poster ? urlOf(item, data.poster) : null, width: data.width, height: data.height, "aria-label": item.name });
  const end = clip.duration ? clip.start + clip.duration : Infinity;
  driveBy(player, item, context, { start: clip.start, end });
  let isFirst = true;
  for (const other of context.items) {
    const track = other.data.over === item.name ? urlOf(other, "subtitles") : null;
    if (!track) continue;
    player.append(element("track", { kind: "subtitles", src: track, label: other.name, default: isFirst }));
    isFirst = false;
  }
  const parts = [player];
  if (data.sound) parts.push(...together(player, item, context, clip));
  const strip = stripOf(item, context);
  player.addEventListener("error", () => {
    const text = element("p", { class: "mm-failure", role: "note" }, "This browser cannot play the video: here are frames of it.");
    player.replaceWith(text, ...[drawStrip(item, context)].flat().filter(Boolean));
    strip?.remove();
  }, { once: true });
  return [...parts, strip];
}

function together(player, item, context, clip) {
  // Audio of its own, which goes with the video.
  const [area, audio] = soundPlayer(item, item.data.sound, context, { follows: true });
  const offset = item.data.sound.offset ?? 0;
  const align = () => { if (audio.isConnected) audio.currentTime = clamp(player.currentTime - clip.start - offset, 0, item.data.sound.duration ?? 0); };
  player.muted = true;
  player.addEventListener("play", () => { align(); audio.play?.().catch(() => {}); });
  player.addEventListener("pause", () => audio.pause?.());
  player.addEventListener("seeked", align);
  audio.removeAttribute("controls");
  return [area, audio];
}

function stripOf(item, context) {
  if (!item.data.strip?.length) return null;
  const start = item.data.clip?.start ?? 0;
  const frames = item.data.strip.map(({ media, seconds }) => {
    const at = seconds - start;
    return { at, node: element("button", { type: "button", class: "mm-thumb", title: `Go to ${clockText(at)}`, "aria-label": `Go to ${clockText(at)}`,
      onclick: () => { say(context.clock, "seek", { seconds: at }); say(context.clock, "time", { seconds: at, name: item.name }); } },
    picture(urlOf(item, media), "", item.data)) };
  });
  const strip = element("div", { class: "mm-strip", role: "group", "aria-label": `Frames of ${item.name}` }, frames.map((one) => one.node));
  follow(context.clock, strip, (seconds) => {
    const now = frames.findLast((one) => one.at <= seconds);
    frames.forEach((one) => one.node.classList.toggle("mm-now", one === now));
  });
  return strip;
}

function drawStrip(item, context) {
  // Frames that follow the clock: of a video that no browser plays, or of JPEGs.
  const { data } = item;
  const start = data.clip?.start ?? 0;
  const frames = data.strip.map((one) => ({ ...one, position: one.seconds }));
  if (!frames.length) return data.poster ? picture(urlOf(item, data.poster), item.name, data) : null;
  let shown = -1;
  const image = picture(urlOf(item, frames[0].media), item.name, data);
  const slider = element("input", { type: "range", min: 0, max: frames.length - 1, value: 0, class: "mm-slider", "aria-label": `Frame of ${item.name}` });
  const where = element("output", { class: "mm-level" });
  const show = (number) => {
    if (number === shown) return;
    shown = number;
    image.src = urlOf(item, frames[number].media);
    slider.value = String(number);
    where.textContent = clockText(frames[number].seconds - start);
    slider.setAttribute("aria-valuetext", where.textContent);
  };
  const seek = (number) => {
    show(number);
    const seconds = frames[number].seconds - start;
    say(context.clock, "seek", { seconds });
    say(context.clock, "time", { seconds, name: item.name });
  };
  slider.addEventListener("input", () => seek(Number(slider.value)));
  slider.addEventListener("keydown", (event) => event.stopPropagation());
  let timer = 0;
  const play = button("▶", "Play the frames", () => {
    if (timer) { clearInterval(timer); timer = 0; play.textContent = "▶"; return; }
    play.textContent = "❚❚";
    timer = setInterval(() => {
      if (!image.isConnected || shown >= frames.length - 1) { clearInterval(timer); timer = 0; play.textContent = "▶"; if (image.isConnected) seek(0); } else seek(shown + 1);
    }, clamp((1000 * (data.duration || 1)) / frames.length, 40, 2000));
  });
  follow(context.clock, slider, (seconds) => show(Math.max(0, frames.findLastIndex((one) => one.seconds - start <= seconds + 1e-6))));
  show(0);
  return [element("div", { class: "mm-frame" }, image), element("div", { class: "mm-bar" }, data.sound ? null : play, slider, where), data.sound ? soundPlayer(item, data.sound, context) : null];
}

// --- plots and notes -------------------------------------------------------------------------------------------------

const LEFT = 64; // pixels for the labels of an axis
const ROW = 64;

function ticks(from, to, count) {
  const span = to - from;
  if (!(span > 0)) return [from];
  const rough = span / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? rough;
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to + step / 1e6 && found.length < 20; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

function drawPlot(item, context, { axis = null } = {}) {
  const { times, channels, reduced, count } = item.data.plot;
  const known = times.filter((one) => one !== null);
  const from = known[0] ?? 0;
  const span = (known.at(-1) ?? 0) - from;
  const xLabel = axis ?? (item.data.unit === "s" ? "seconds" : item.data.unit ?? "");
  let shown = Math.min(channels.length, MAX_ROWS);
  const root = element("div", { class: "mm-plot" });
  const value = element("output", { class: "mm-readout" });
  const build = () => {
    const height = shown * ROW + 34;
    const canvas = canvasOf(height, (pen, width, _, colours) => rows(pen, width, colours), { role: "img", "aria-label": `${item.name}: ${channels.length} channels over ${xLabel}` });
    const area = axis && !item.data.over ? element("div", { class: "mm-timeline" }, canvas)
      : timeline(canvas, item, context, { span: span || 1, from, left: LEFT, right: 8, label: `Position in ${item.name}` });
    canvas.addEventListener("pointermove", (event) => {
      const width = canvas.clientWidth - LEFT - 8;
      read(from + ((event.offsetX - LEFT) / width) * span);
    });
    return area;
  };
  const read = (at) => {
    let place = times.findIndex((one) => one !== null && one > at);
    place = clamp((place < 0 ? times.length : place) - 1, 0, times.length - 1);
    const words = channels.slice(0, shown).map((one) => `${one.name} ${one.values ? short(one.values[place]) : `${short(one.low[place])} … ${short(one.high[place])}`}`);
    value.textContent = `${short(times[place])} ${axis ? "" : item.data.unit ?? ""}: ${words.slice(0, 8).join(", ")}`;
  };
  const rows = (pen, width, colours) => {
    const inner = width - LEFT - 8;
    const x = (at) => LEFT + (span ? (at - from) / span : 0.5) * inner;
    channels.slice(0, shown).forEach((channel, row) => {
      const top = row * ROW + 6;
      const low = channel.values ?? channel.low;
      const high = channel.values ?? channel.high;
      const numbers = [...low, ...high].filter((one) => one !== null);
      const least = numbers.length ? numbers.reduce((one, two) => Math.min(one, two)) : 0;
      const most = numbers.length ? numbers.reduce((one, two) => Math.max(one, two)) : 0;
      const y = (one) => top + (ROW - 16) * (most > least ? 1 - (one - least) / (most - least) : 0.5);
      pen.strokeStyle = colours.line;
      pen.strokeRect(LEFT + 0.5, top + 0.5, inner, ROW - 16);
      pen.fillStyle = colours.muted;
      pen.textAlign = "right";
      pen.fillText(short(most), LEFT - 4, top + 9, LEFT - 6);
      pen.fillText(short(least), LEFT - 4, top + ROW - 16, LEFT - 6);
      pen.fillStyle = colours.ink;
      pen.textAlign = "left";
      pen.fillText(channel.name, 2, top + ROW / 2 - 4, LEFT - 6);
      pen.strokeStyle = pen.fillStyle = colours.accent;
      pen.lineWidth = 1.25;
      pen.beginPath();
      let isDown = false;
      low.forEach((one, place) => {
        if (one === null || high[place] === null || times[place] === null) { isDown = false; return; }
        const at = x(times[place]);
        if (reduced) { pen.moveTo(at, y(one)); pen.lineTo(at, y(high[place]) - 0.5); return; }
        if (isDown) pen.lineTo(at, y(one));
        else { pen.moveTo(at, y(one)); pen.lineTo(at + 0.5, y(one)); }
        isDown = true;
      });
      pen.stroke();
      pen.lineWidth = 1;
    });
    pen.fillStyle = colours.muted;
    pen.textAlign = "center";
    const bottom = shown * ROW + 6;
    ticks(from, from + span, Math.max(2, Math.floor(inner / 90))).forEach((at) => pen.fillText(short(at), clamp(x(at), LEFT + 8, width - 16), bottom));
    pen.textAlign = "right";
    pen.fillText(xLabel, width - 8, bottom + 16);
  };
  const more = channels.length > shown ? button(`All ${channels.length} channels`, `Plot all ${channels.length} channels`, () => { shown = channels.length; root.firstChild.replaceWith(build()); more.remove(); }) : null;
  root.append(build(), value);
  follow(context.clock, value, read);
  if (more) root.append(more);
  if (reduced) root.append(element("p", { class: "mm-hint" }, `Lowest and highest of each of ${times.length} stretches of ${count.toLocaleString()} steps.`));
  return root;
}

function drawNotes(item, context) {
  const { notes, duration, lowest, highest } = item.data;
  const span = duration || 1;
  const pitches = highest - lowest + 3;
  const height = clamp(pitches * 5, 120, 360);
  const canvas = canvasOf(height, (pen, width, _, colours) => {
    const each = height / pitches;
    for (let pitch = lowest - 1; pitch <= highest + 1; pitch++) {
      if (pitch % 12 !== 0) continue;
      const y = height - (pitch - lowest + 2) * each;
      pen.fillStyle = colours.line;
      pen.fillRect(0, y + each, width, 1);
      pen.fillStyle = colours.muted;
      pen.fillText(`C${Math.floor(pitch / 12) - 1}`, 2, y + each - 2);
    }
    notes.forEach(([onset, length, pitch, velocity, channel]) => {
      pen.globalAlpha = 0.35 + (0.65 * velocity) / 127;
      pen.fillStyle = channel === 9 ? colours.muted : colours.accent;
      pen.fillRect((onset / span) * width, height - (pitch - lowest + 2) * each, Math.max(1.5, (length / span) * width), Math.max(1.5, each - 1));
    });
    pen.globalAlpha = 1;
  }, { role: "img", "aria-label": `Piano roll of ${notes.length} notes` });
  canvas.style.width = `${clamp(span * 24, 0, 12000)}px`;
  const area = timeline(canvas, item, context, { span, label: `Position in ${item.name}`, wide: true });
  const scroller = element("div", { class: "mm-scroll" }, area);
  const names = ["C", "C♯", "D", "D♯", "E", "F", "F♯", "G", "G♯", "A", "A♯", "B"];
  const table = element("details", {}, element("summary", {}, `List of ${Math.min(300, notes.length)} notes`));
  table.addEventListener("toggle", () => {
    if (table.childElementCount > 1) return;
    table.append(element("div", { class: "mm-scroll" }, element("table", { class: "mm-table" },
      element("thead", {}, element("tr", {}, ["onset, s", "duration, s", "note", "velocity", "channel"].map((one) => element("th", { scope: "col" }, one)))),
      element("tbody", {}, notes.slice(0, 300).map(([onset, length, pitch, velocity, channel]) => element("tr", {}, [onset.toFixed(3), length.toFixed(3), `${names[pitch % 12]}${Math.floor(pitch / 12) - 1} (${pitch})`, velocity, channel + 1].map((one) => element("td", {}, String(one)))))))));
  });
  follow(context.clock, scroller, (seconds) => {
    const at = (seconds / span) * canvas.clientWidth;
    if (at < scroller.scrollLeft || at > scroller.scrollLeft + scroller.clientWidth) scroller.scrollLeft = at - 40;
  });
  const file = urlOf(item, "file");
  return [scroller, table, file ? element("a", { href: file, download: `${item.name}.mid`.replace(/\.midi?\.mid$/i, ".mid"), class: "mm-hint" }, "Download the MIDI file") : null];
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
