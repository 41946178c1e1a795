// The list beside the image. Owns: boxes and classes as text, the stages of a request as a bar. Knows no request.
import { colour, nameOf, placedIn } from "./draw.js";
import { say } from "./words.js";

export const element = (name, className = "", text = "") => {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
};

const STAGES = [["network", say("network"), "--c-upload"], ["decode", say("decode"), "--c-decode"], ["queue", say("queue"), "--c-queue"],
  ["infer", say("device"), "--c-infer"], ["post", say("postprocess"), "--c-post"]];

// Fill the list; `onLight(index)` is called when an entry is pointed at or focused, with -1 when no longer.
export function showFound(list, entries, coloured, onLight) {
  list.replaceChildren(...entries.map((found, index) => {
    const button = element("button");
    button.type = "button";
    const swatch = element("span", "swatch");
    swatch.style.background = coloured ? colour(found.class_id ?? 0) : "var(--accent)";
    const track = element("span", "track");
    const fill = element("span", "fill");
    fill.style.width = found.score === undefined ? "0" : `${Math.max(1, found.score * 100)}%`;
    if (coloured) fill.style.background = colour(found.class_id ?? 0);
    track.append(fill);
    button.append(swatch, element("span", "name", nameOf(found)), track, element("span", "score", found.value === undefined ? percent(found.score) : digits(found.value)));
    button.addEventListener("pointerenter", () => onLight(index));
    button.addEventListener("pointerleave", () => onLight(-1));
    button.addEventListener("focus", () => onLight(index));
    button.addEventListener("blur", () => onLight(-1));
    const entry = element("li");
    entry.append(button);
    return entry;
  }));
}

// An entry of the list of files: {entry, canvas, show(text, bad), choose(chosen)}; `onChoose()` when it is clicked.
export function fileEntry(name, onChoose) {
  const entry = element("li"), button = element("button"), canvas = element("canvas"), said = element("span", "said");
  button.type = "button";
  button.append(canvas, element("span", "", name), said);
  button.addEventListener("click", onChoose);
  entry.append(button);
  return {
    entry, canvas,
    show(text, bad) { said.textContent = said.title = text; said.classList.toggle("bad", bad); },
    choose(chosen) { button.setAttribute("aria-current", String(chosen)); },
  };
}

export function lightEntry(list, index) {
  [...list.querySelectorAll("button")].forEach((button, number) => button.classList.toggle("on", number === index));
}

const digits = (value) => String(Number(value.toPrecision(4)));

// What is listed of an entry whose members have no place: classes, shares of the image, or values.
export function listed(prediction) {
  if (prediction.areas) return prediction.areas.map((each) => ({ ...each, score: each.share }));
  if (prediction.values) return Object.entries(prediction.values).map(([label, value]) => ({ label, value }));
  return prediction.classes ?? [];
}

// Of what is no list of instances: "road 61 %, sky 20 %", "age 31.2", or the entry itself as JSON.
function described(prediction, shown) {
  const { embedding, depth } = prediction;
  if (prediction.areas) return shown.slice(0, 6).map((each) => `${each.label} ${percent(each.share)}`).join(", ");
  if (prediction.values) return shown.slice(0, 6).map((each) => `${each.label} ${digits(each.value)}`).join(", ");
  if (embedding) return say("vector", { count: embedding.length });
  if (depth) return say("depth", { min: digits(depth.min), max: digits(depth.max) });
  return JSON.stringify(prediction).slice(0, 200);
}

// "3 objects: 2 star, 1 ring".
export function summarise(prediction, shown) {
  if (prediction.classes) {
    const best = prediction.classes[0];
    return best ? `${best.label}, ${percent(best.score)}` : say("no_class");
  }
  if (!placedIn(prediction)) return described(prediction, shown);
  if (!shown.length) return say("nothing");
  const counts = new Map();
  for (const found of shown) counts.set(nameOf(found), (counts.get(nameOf(found)) || 0) + 1);
  const parts = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 6).map(([name, count]) => `${count} ${name}`);
  return say(shown.length === 1 ? "object" : "objects", { count: shown.length, names: parts.join(", ") + (counts.size > 6 ? ", …" : "") });
}

export const duration = (ms) => ms < 1000 ? `${ms.toFixed(ms < 100 ? 1 : 0)} ms` : `${(ms / 1000).toFixed(2)} s`;

export const percent = (share) => `${(share * 100).toFixed(share >= 0.0995 || share === 0 ? 0 : 1)} %`;

// The request as a bar of its stages. What the service does not account for is the way there and back.
export function showTiming(bar, legend, timing, totalMs) {
  const known = Object.values(timing).reduce((sum, each) => sum + each, 0);
  const ms = { ...timing, network: Math.max(0, totalMs - known) };
  const parts = STAGES.filter(([name]) => ms[name] !== undefined);
  bar.replaceChildren(...parts.map(([name, , variable]) => {
    const part = element("span");
    part.style.flexGrow = ms[name];
    part.style.flexBasis = "0";
    part.style.background = `var(${variable})`;
    return part;
  }));
  legend.replaceChildren(...parts.map(([name, text, variable]) => {
    const row = element("div");
    const term = element("dt", "", text);
    term.style.setProperty("--swatch", `var(${variable})`);
    row.append(term, element("dd", "", duration(ms[name])));
    return row;
  }));
}
