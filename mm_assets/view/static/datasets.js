// The list of datasets: counts and a picture of each, asked for one after the other, since each is opened for it.
//
// Texts only ever become text nodes.

import { element } from "./item_parts.js";

const plural = (number, noun) => `${Number(number).toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;

async function show(card) {
  const base = card.getAttribute("href");
  const facts = card.querySelector(".text");
  const picture = card.querySelector(".thumb");
  const found = await fetch(`@summary/${base.slice(0, -1)}`).then((answer) => answer.json()).catch((error) => ({ error: error.message }));
  if (found.error) {
    facts.textContent = facts.title = found.error;
    facts.classList.add("warning");
  } else {
    const { samples, partitions, card: first } = found;
    facts.textContent = [samples === null ? null : plural(samples, "sample"), partitions ? plural(partitions, "partition") : null].filter(Boolean).join(", ");
    picture.replaceChildren(first?.picture ? element("img", { src: base + first.picture, alt: "", decoding: "async" })
      : first?.text ? element("p", {}, first.text) : "no picture");
  }
  card.removeAttribute("aria-busy");
}

for (const card of document.querySelectorAll(".card")) await show(card);
