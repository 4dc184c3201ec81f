// Audio, video, plots and notes: what has a time axis, and follows the clock of its sample.

import { element, button, clamp, mediaOf, urlOf, short, clockText, failure, say, follow, driveBy, canvasOf, timeline, picture } from "./item_parts.js";

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
  let wanted = 0;
  player.addEventListener("seeking", () => { wanted = player.currentTime || wanted; });
  player.addEventListener("timeupdate", () => { if (!player.error && !player.paused) wanted = player.currentTime; });
  player.addEventListener("error", () => {
    const made = sound.fallback ? urlOf(item, sound.fallback) : null;
    if (made && player.src !== new URL(made, location.href).href) {
      const [at, { paused }] = [wanted, player]; // it may have failed at a seek
      player.addEventListener("loadedmetadata", () => { player.currentTime = at; if (!paused) player.play().catch(() => {}); }, { once: true });
      player.src = made;
    } else player.replaceWith(failure("This browser cannot play the audio."));
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

export function drawAudio(item, context) {
  return [soundPlayer(item, item.data, context), lyricsOver(item, context)];
}

function lyricsOver(item, context) {
  const names = context.items.filter((one) => one.data.over === item.name && one.data.segments).map((one) => one.name);
  return names.length ? element("p", { class: "mm-hint" }, `${names.join(", ")} follow${names.length === 1 ? "s" : ""} this.`) : null;
}

export function drawVideo(item, context) {
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
  for (const { media, label, language } of data.tracks ?? []) { // those in the file itself
    player.append(element("track", { kind: "subtitles", src: urlOf(item, media), label, srclang: language || null, default: isFirst }));
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

const MAX_ROWS = 8; // of a plot, that are shown at first
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

export function drawPlot(item, context, { axis = null } = {}) {
  const { times, channels, reduced, count } = item.data.plot;
  const known = times.filter((one) => one !== null);
  const from = known[0] ?? 0;
  const span = (known.at(-1) ?? 0) - from;
  const xLabel = axis ?? (item.data.unit === "s" ? "seconds" : item.data.unit ?? "");
  let shown = Math.min(channels.length, MAX_ROWS);
  const root = element("div", { class: "mm-plot" });
  const value = element("output", { class: "mm-readout", dir: "auto" });
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

function notePlayer(item, context) {
  // Plain tones, a quarter of a second ahead of the clock: enough to hear whether the notes are the right ones.
  const { notes, duration } = item.data;
  let audio = null, timer = 0, begun = 0, from = 0, next = 0;
  const now = () => (timer ? from + audio.currentTime - begun : from);
  const stop = () => {
    if (!timer) return;
    from = now();
    clearInterval(timer);
    timer = 0;
    audio.close();
    play.textContent = "▶";
  };
  const sound = ([onset, length, pitch, velocity]) => {
    const [tone, gain] = [audio.createOscillator(), audio.createGain()];
    const start = begun + Math.max(onset, from) - from;
    const end = start + clamp(length, 0.05, 8);
    tone.type = "triangle";
    tone.frequency.value = 440 * 2 ** ((pitch - 69) / 12);
    gain.gain.setValueAtTime(0, start);
    gain.gain.linearRampToValueAtTime(0.12 * (velocity / 127), start + 0.01);
    gain.gain.setTargetAtTime(0, end - 0.03, 0.03);
    tone.connect(gain).connect(audio.destination);
    tone.start(start);
    tone.stop(end + 0.2);
  };
  const step = () => {
    const at = now();
    if (!play.isConnected || at >= duration) { stop(); from = 0; return; }
    while (next < notes.length && notes[next][0] < at + 0.25) { if (notes[next][4] !== 9) sound(notes[next]); next += 1; } // percussion has no pitch
    say(context.clock, "time", { seconds: at, name: item.name });
  };
  const start = () => {
    audio = new AudioContext();
    begun = audio.currentTime + 0.05;
    next = notes.findIndex(([onset]) => onset >= from);
    if (next < 0) next = notes.length;
    timer = setInterval(step, 40);
    play.textContent = "❚❚";
    say(context.clock, "play", { player: play });
  };
  const play = button("▶", "Play the notes as plain tones", () => (timer ? stop() : start()));
  context.clock?.addEventListener("play", (event) => { if (event.detail.player !== play) stop(); });
  context.clock?.addEventListener("seek", (event) => { const plays = timer !== 0; stop(); from = clamp(event.detail.seconds, 0, duration); if (plays) start(); });
  return element("div", { class: "mm-bar" }, play, "plain tones");
}

export function drawNotes(item, context) {
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
  return [scroller, notes.length ? notePlayer(item, context) : null, table, file ? element("a", { href: file, download: `${item.name}.mid`.replace(/\.midi?\.mid$/i, ".mid"), class: "mm-hint" }, "Download the MIDI file") : null];
}
