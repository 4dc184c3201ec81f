// What items are drawn with: elements, the clock that a sample's players share, canvases and timelines.
//
// Text is only ever set as text, never as markup.

// --- elements --------------------------------------------------------------------------------------------------------

/** Whether an element holds nothing but text, or is for typing it: its own letters decide its direction then. */
export const showsText = (tag, children) => (tag === "input" || tag === "textarea"
  || (children.length > 0 && children.every((child) => typeof child === "string" || typeof child === "number")));

export function element(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  const shown = children.flat(3).filter((child) => child !== null && child !== undefined && child !== false);
  if (showsText(name, shown) && !node.hasAttribute("dir")) node.setAttribute("dir", "auto");
  node.append(...shown);
  return node;
}

export function button(label, title, onclick) {
  return element("button", { type: "button", class: "mm-button", title, "aria-label": title, onclick }, label);
}

export const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
export const mediaOf = (item, name) => item.media.find((one) => one.name === name) ?? null;
export const urlOf = (item, name) => mediaOf(item, name)?.url ?? null;

export function short(value) {
  if (value === null || value === undefined) return "—";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : Number(value.toPrecision(4)).toString();
}

export function clockText(seconds) {
  const whole = Math.max(0, seconds);
  const minutes = Math.floor(whole / 60);
  return `${minutes}:${(whole - 60 * minutes).toFixed(whole < 60 ? 2 : 0).padStart(whole < 60 ? 5 : 2, "0")}`;
}

export function failure(text) {
  return element("p", { class: "mm-failure", role: "note" }, text);
}

// --- the clock -------------------------------------------------------------------------------------------------------

export const say = (clock, kind, detail) => clock?.dispatchEvent(new CustomEvent(kind, { detail }));

export function follow(clock, node, react) {
  // The listener lives as long as its node is on the page.
  const listener = (event) => {
    if (node.isConnected) react(event.detail.seconds, event.detail.name);
    else if (node.dataset.seen) clock.removeEventListener("time", listener);
    if (node.isConnected) node.dataset.seen = "1";
  };
  clock?.addEventListener("time", listener);
}

export function driveBy(player, item, context, { start = 0, end = Infinity, offset = 0 } = {}) {
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

export function canvasOf(height, draw, properties = {}) {
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
    const colour = (name, otherwise) => { // a variable's own value names a colour for each theme, which no canvas takes
      canvas.style.color = `var(${name}, ${otherwise})`;
      return style.color;
    };
    pen.font = `12px ${style.fontFamily}`;
    draw(pen, width, height, {
      ink: colour("--ink", "CanvasText"),
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

export function timeline(canvas, item, context, { span, label, from = 0, left = 0, right = 0, wide = false }) {
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

// --- pictures -------------------------------------------------------------------------------------------------------

export function picture(url, alt, size = {}) {
  const image = element("img", { src: url, alt, loading: "lazy", decoding: "async", width: size.width, height: size.height });
  image.addEventListener("load", () => image.classList.add("mm-loaded"), { once: true }); // a place that waits has no squares
  image.addEventListener("error", () => image.replaceWith(failure("This picture cannot be decoded.")), { once: true });
  return image;
}

