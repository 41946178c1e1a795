// The page. Owns: what is shown, and what happens when somebody drops, chooses, types or turns something.
import { getJson, predict, ServiceError, setKey } from "./api.js";
import { Camera } from "./camera.js";
import { LANGUAGES, snippet } from "./code.js";
import { mapOf, placedIn } from "./draw.js";
import { Live } from "./live.js";
import { Load, spread } from "./load.js";
import { duration, element, fileEntry, lightEntry, listed, showFound, showTiming, summarise } from "./results.js";
import { Stage } from "./stage.js";
import { coco, csv } from "./tables.js";
import { fill, kindOf, say } from "./words.js";

const LEAST_SCORE = 0.05; // Asked for; the slider chooses among what came, so that it acts at once.
const get = (id) => document.getElementById(id);
const state = { facts: null, models: [], model: null, items: [], item: null, filter: "", sendable: null, shown: [], language: "curl", number: 0 };

const itemOf = (file, name) => ({ file, name, result: null, error: null, listed: null });

const stage = new Stage(get("canvas"), get("stage"), light);
const live = new Live(showStatus);
const load = new Load(() => ({ model: state.model.name, image: state.item.file, query: queryOf(threshold()) }), () => live.latest, loadEnded);
const camera = new Camera(get("video"), {
  request: () => ({ model: state.model.name, query: queryOf(LEAST_SCORE) }),
  onDraw: drawCamera, onFrame: cameraAnswered, onError: (error) => { stopCamera(); showError(error); },
  onFacts: (text) => { if (get("camera-facts").textContent !== text) get("camera-facts").textContent = text; },
});

// Of the sample images that fit the model: those to classify, or those with objects in them.
const sampleTask = () => state.model?.finds === "classes" ? "classify" : "detect";
const threshold = () => Number(get("threshold").value);
const queryOf = (score) => state.model.finds === "classes" ? { top_k: 5 } : { score_threshold: score };

async function start() {
  fill(document);
  setTheme(null);
  wire();
  try {
    await readService();
  } catch (error) {
    showError(error);
  }
  live.follow();
  document.documentElement.dataset.loaded = "true";
}

async function readService() {
  state.facts ??= await getJson("playground/facts.json");
  showSamples();
  await readModels();
}

async function readModels() {
  state.models = (await getJson("v1/models")).models;
  state.model = state.models.find((model) => model.name === state.model?.name) || state.models.find((model) => model.finds === "objects") || state.models.find((model) => model.finds !== "tensors") || state.models[0];
  get("models").replaceChildren(...state.models.map((model) => {
    const label = element("label");
    const input = element("input");
    Object.assign(input, { type: "radio", name: "model", value: model.name, checked: model === state.model, disabled: model.finds === "tensors" });
    if (model.finds === "tensors") label.title = say("tensors");
    input.addEventListener("change", () => choose(model));
    label.append(input, model.name);
    return label;
  }));
  showCode();
  showSamples();
}

function choose(model) {
  state.model = model;
  state.filter = "";
  for (const item of state.items) item.result = null;
  showSamples();
  showCode();
  show();
  if (!camera.on && state.items.length) ask();
}

// ---- an image comes -------------------------------------------------------------------------------------------------

function wire() {
  get("choose").addEventListener("click", () => get("file").click());
  get("file").addEventListener("change", () => { take([...get("file").files]); get("file").value = ""; });
  get("camera").addEventListener("click", () => camera.on ? stopCamera() : startCamera());
  let depth = 0;
  addEventListener("dragenter", (event) => { event.preventDefault(); depth += 1; get("drop").classList.add("on"); });
  addEventListener("dragleave", () => { depth -= 1; if (depth <= 0) get("drop").classList.remove("on"); });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    get("drop").classList.remove("on");
    if (event.dataTransfer.files.length) take([...event.dataTransfer.files]); else showError(new Error(say("no_file")));
  });
  addEventListener("paste", (event) => {
    take([...event.clipboardData.items].filter((each) => each.kind === "file").map((each) => each.getAsFile()));
  });
  get("threshold").addEventListener("input", () => { get("threshold-value").textContent = threshold().toFixed(2); show(); showCode(); });
  get("filter").addEventListener("change", () => { state.filter = get("filter").value; show(); });
  get("key-form").addEventListener("submit", (event) => { event.preventDefault(); get("key-box").open = false; get("key").blur(); });
  get("key").addEventListener("change", () => { setKey(get("key").value); showCode(); clearError(); readService().catch(showError); live.restart(); });
  get("theme").addEventListener("click", nextTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(theme));
  get("save-image").addEventListener("click", async () => save(await stage.save(), `${stem()}.anychip.png`));
  get("save-json").addEventListener("click", () => save(json(shownAnswer()), `${stem()}.anychip.json`));
  get("save-csv").addEventListener("click", () => save(new Blob([csv(lines())], { type: "text/csv" }), `${stemOfAll()}.anychip.csv`));
  get("save-coco").addEventListener("click", () => save(json(coco(lines())), `${stemOfAll()}.coco.json`));
  get("copy").addEventListener("click", copy);
  get("tabs").replaceChildren(...LANGUAGES.map((language) => {
    const tab = element("button", "", language);
    Object.assign(tab, { type: "button", id: `tab-${language}`, role: "tab" });
    tab.setAttribute("aria-controls", "snippet-panel");
    tab.addEventListener("click", () => { state.language = language; showCode(); });
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      state.language = LANGUAGES[(LANGUAGES.indexOf(language) + step + LANGUAGES.length) % LANGUAGES.length];
      showCode();
      get(`tab-${state.language}`).focus();
    });
    return tab;
  }));
  for (const name of ["load-images", "load-seconds"]) get(name).addEventListener("input", loadNote);
  get("load-start").addEventListener("click", () => load.running ? load.stop() : startLoad());
  new ResizeObserver(() => load.redraw()).observe(get("charts"));
  loadNote();
}

function showSamples() {
  if (!state.facts) return;
  const known = state.model?.weights === "sample" ? state.facts.known[state.model.name] : null;
  get("known").hidden = !known;
  if (known) get("known").textContent = say("demo", { model: state.model.name, count: known.length, shapes: known.join(", ") });
  const rank = (sample) => Number(sample.task !== sampleTask());
  const ordered = [...state.facts.samples].sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name));
  get("samples").replaceChildren(...ordered.map(({ name }) => {
    const button = element("button");
    button.type = "button";
    const image = element("img");
    Object.assign(image, { src: `playground/samples/${name}`, alt: say("sample", { name: name.replace(/\.\w+$/, "").replaceAll("_", " ") }) });
    button.append(image);
    button.setAttribute("aria-pressed", String(state.item?.name === name));
    button.addEventListener("click", async () => {
      const response = await fetch(image.src);
      take([new File([await response.blob()], name, { type: "image/jpeg" })]);
    });
    return button;
  }));
}

// Files that come take the place of those before. Each is answered in turn; the first is shown.
async function take(files) {
  if (!files.length) return;
  if (camera.on) stopCamera();
  state.number += 1;
  const items = state.items = files.map((file) => itemOf(file, file.name || "image.png"));
  if (items.length > 1) for (const item of items) item.listed = fileEntry(item.name, () => select(item));
  get("files").replaceChildren(...items.flatMap((item) => item.listed?.entry ?? []));
  await select(items[0]);
  if (state.items === items) await ask();
}

async function select(item) {
  state.item = item;
  clearError();
  [...get("samples").querySelectorAll("button")].forEach((button) => {
    button.setAttribute("aria-pressed", String(button.firstChild.src.endsWith(`/${item.name}`)));
  });
  get("empty").hidden = true;
  const bitmap = await createImageBitmap(item.file).catch(() => null);
  if (state.item !== item) return;
  if (bitmap) stage.show(bitmap, bitmap.width, bitmap.height);
  else { // The service may read what this browser does not, and says it if not.
    stage.clear();
    get("empty").hidden = false;
  }
  show();
  showCode();
}

async function ask() {
  const number = state.number += 1;
  clearError();
  get("busy").hidden = false;
  for (const item of state.items) Object.assign(item, { result: null, error: null });
  showFiles();
  for (const item of state.items) {
    if (item.listed) await showThumbnail(item);
    const answer = await answerTo(item.file).catch((error) => explained(error, item.file));
    if (number !== state.number) return;
    if (answer instanceof Error) item.error = answer;
    else {
      item.result = answer;
      state.sendable = { file: item.name, type: item.file.type };
    }
    showFiles();
    if (item !== state.item) continue;
    show();
    showCode();
  }
  get("busy").hidden = true;
}

async function answerTo(file) {
  const result = await predict(state.model.name, file, queryOf(LEAST_SCORE));
  result.map = await mapOf(result.prediction);
  return result;
}

async function showThumbnail({ file, listed: { canvas } }) {
  const small = await createImageBitmap(file, { resizeWidth: 120, resizeQuality: "medium" }).catch(() => null);
  if (!small) return;
  canvas.width = small.width;
  canvas.height = small.height;
  canvas.getContext("2d").drawImage(small, 0, 0);
  small.close();
}

// A service that refuses a large body at its first bytes may close the connection before the browser has read why.
function explained(error, image) {
  const most = state.facts?.max_body_bytes;
  if (error.code !== "UNREACHABLE" || !most || image.size <= most) return error;
  return new ServiceError(413, "BODY_TOO_LARGE", say("body_too_large", { bytes: most }));
}

// ---- what was found -------------------------------------------------------------------------------------------------

// An entry without the instances that the slider and the class leave out.
function chosenOf(prediction) {
  const [list, found] = placedIn(prediction) || [];
  if (!list) return prediction;
  return { ...prediction, [list]: found.filter((each) => each.score >= threshold() && (!state.filter || each.label === state.filter)) };
}

const instancesOf = (prediction) => placedIn(chosenOf(prediction))?.[1] ?? listed(prediction);

// Every file's line of a table, once all are answered.
function lines() {
  return state.items.map(({ name, result, error }) => result ? { ...chosenOf(result.prediction), file: name } : { file: name, error: error.message });
}

function showFiles() {
  const { items } = state;
  const answered = items.filter((item) => item.result), failed = items.filter((item) => item.error);
  const ended = answered.length > 0 && answered.length + failed.length === items.length;
  get("save-csv").disabled = !ended;
  get("save-coco").disabled = !(ended && answered.every((item) => item.result.prediction.detections));
  showFilter(answered);
  get("all").hidden = items.length < 2;
  if (items.length < 2) return;
  get("files-note").textContent = say("all_files", { done: answered.length, count: items.length, failed: failed.length });
  for (const { result, error, listed: entry } of items) {
    entry.show(result ? summarise(result.prediction, instancesOf(result.prediction)) : error ? sentence(error.message) : say("waiting"), Boolean(error));
  }
}

function showFilter(answered) {
  const found = answered.flatMap((item) => placedIn(item.result.prediction)?.[1] ?? []).filter((each) => each.score >= threshold());
  const labels = [...new Set([...found.map((each) => each.label), state.filter].filter(Boolean))].sort();
  get("filter-box").hidden = labels.length < 2 && !state.filter;
  if (get("filter").dataset.labels === JSON.stringify(labels)) return; // An open list stays as it is.
  get("filter").dataset.labels = JSON.stringify(labels);
  get("filter").replaceChildren(...["", ...labels].map((label) => {
    const option = element("option", "", label || say("all_classes"));
    option.value = label;
    return option;
  }));
  get("filter").value = state.filter;
}

function show() {
  const { item } = state, result = item?.result;
  showFiles();
  for (const each of state.items) each.listed?.choose(each === item);
  get("save-image").disabled = !(result && stage.source);
  get("save-json").disabled = !result;
  get("timing").hidden = !result;
  get("threshold-box").hidden = !(result && placedIn(result.prediction));
  if (!result) {
    get("summary").textContent = item ? "" : say("nothing_asked");
    get("found").replaceChildren();
    state.shown = [];
    get("canvas").setAttribute("aria-label", item ? say("not_answered", { file: item.name }) : say("no_image"));
    Object.assign(stage, { instances: [], map: null, caption: "" });
    stage.draw();
    if (item?.error) showError(item.error);
    return;
  }
  const { prediction, timing, totalMs } = result;
  const placed = Boolean(placedIn(prediction));
  state.shown = instancesOf(prediction);
  const text = summarise(prediction, state.shown);
  const summary = get("summary");
  summary.replaceChildren(element("strong", "", text), say("in_time", { time: duration(totalMs) }));
  get("canvas").setAttribute("aria-label", `${item.name}: ${text}`);
  showFound(get("found"), state.shown, placed || Boolean(prediction.areas), light);
  showTiming(get("stages"), get("legend"), timing, totalMs);
  stage.instances = placed ? state.shown : [];
  stage.map = result.map;
  const best = prediction.classes?.[0];
  stage.caption = best ? `${best.label} ${best.score.toFixed(2)}` : "";
  stage.lit = -1;
  stage.draw();
  get("canvas").dataset.answers = String(Number(get("canvas").dataset.answers || 0) + 1);
}

function light(index) {
  if (stage.lit === index || camera.on) return;
  stage.lit = stage.instances.length ? index : -1;
  lightEntry(get("found"), stage.lit);
  stage.draw();
}

function showError(error) {
  const box = get("error");
  const lines = [];
  const first = element("p");
  if (error.code) first.append(element("code", "", `${error.status || ""} ${error.code}`.trim()), " ");
  first.append(sentence(error.message));
  lines.push(first);
  if (kindOf(error.code)) lines.push(element("p", "", kindOf(error.code)));
  const more = [error.status === 500 ? say("log") : "", error.retryAfter ? say("retry", { seconds: error.retryAfter }) : "", error.requestId ? say("request_id", { id: error.requestId }) : ""].filter(Boolean).join(" ");
  if (more) lines.push(element("p", "hint", more));
  if (error.status === 401) get("key-box").open = true;
  box.replaceChildren(...lines);
  box.hidden = false;
}

const sentence = (text) => text ? text[0].toUpperCase() + text.slice(1) + (/[.!?。]$/.test(text) ? "" : ".") : "";
function clearError() { get("error").hidden = true; get("error").replaceChildren(); }

function showStatus(kind, text) {
  get("status").className = `status ${kind}`;
  if (get("status-text").textContent !== text) get("status-text").textContent = text;
}

// ---- camera ---------------------------------------------------------------------------------------------------------

async function startCamera() {
  clearError();
  try {
    await camera.start();
  } catch (error) {
    camera.stop();
    showError(error.name === "NotAllowedError" ? new Error(say("camera_refused"))
      : error.name === "NotFoundError" ? new Error(say("no_camera")) : error);
    return;
  }
  state.number += 1;
  state.items = [state.item = itemOf(null, "frame.jpg")];
  get("busy").hidden = true;
  get("empty").hidden = true;
  get("camera-facts").hidden = false;
  get("camera").textContent = say("stop");
  get("camera").setAttribute("aria-pressed", "true");
  get("summary").setAttribute("aria-live", "off"); // Many answers a second are nothing to read aloud.
  stage.show(get("video"), get("video").videoWidth, get("video").videoHeight);
  showCode();
}

function drawCamera() {
  const video = get("video");
  if (stage.width !== video.videoWidth) stage.show(video, video.videoWidth, video.videoHeight);
  stage.draw();
}

async function cameraAnswered(result, scale) {
  const map = await mapOf(result.prediction);
  if (!camera.on) return;
  state.item.result = { ...result, map, prediction: scaled(result.prediction, scale) };
  show();
}

// Frames are sent smaller than they are shown.
function scaled(prediction, scale) {
  const grow = (value, key) => Array.isArray(value) ? value.map((each) => grow(each))
    : value && typeof value === "object" ? Object.fromEntries(Object.entries(value).map(([name, each]) => [name, name === "score" ? each : grow(each, name)]))
    : typeof value === "number" ? value * scale : value;
  const places = ["box", "corners", "segments", "keypoints", "mask"];
  const [list, found] = placedIn(prediction) || [];
  const grown = found?.map((one) => Object.fromEntries(Object.entries(one).map(([name, value]) => [name, places.includes(name) ? grow(value) : value])));
  return found ? { ...prediction, [list]: grown } : prediction;
}

async function stopCamera() {
  const video = get("video");
  // The last frame stays, as an image like any other.
  const still = document.createElement("canvas");
  still.width = video.videoWidth;
  still.height = video.videoHeight;
  still.getContext("2d").drawImage(video, 0, 0);
  camera.stop();
  get("camera").textContent = say("camera");
  get("camera").setAttribute("aria-pressed", "false");
  get("camera-facts").hidden = true;
  get("summary").setAttribute("aria-live", "polite");
  const blob = still.width ? await new Promise((resolve) => still.toBlob(resolve, "image/jpeg", 0.92)) : null;
  if (blob && !state.item.file) await take([new File([blob], "frame.jpg", { type: "image/jpeg" })]);
}

// ---- load -----------------------------------------------------------------------------------------------------------

function loadNote() {
  const images = Number(get("load-images").value);
  get("load-images-value").textContent = images;
  get("load-seconds-value").textContent = get("load-seconds").value;
  const parts = spread(images);
  const most = Math.max(...parts);
  get("load-note").textContent = most > 1
    ? say("forms", { count: parts.length, most }) : say(parts.length === 1 ? "one_request" : "requests", { count: parts.length });
}

async function startLoad() {
  clearError();
  if (camera.on) await stopCamera();
  if (!state.item?.file) {
    const sample = state.facts?.samples.find((each) => each.task === sampleTask());
    if (!sample) return showError(new Error(say("image_first")));
    const response = await fetch(`playground/samples/${sample.name}`);
    await take([new File([await response.blob()], sample.name, { type: "image/jpeg" })]);
  }
  get("load-start").textContent = say("stop");
  get("load-summary").textContent = "";
  load.doneBefore = 0;
  await load.start(Number(get("load-images").value), Number(get("load-seconds").value));
}

function loadEnded({ images, refused, rate, p50, p99, batch, error }) {
  get("load-start").textContent = say("start");
  if (error) showError(error);
  get("load-summary").textContent = [
    say("load_rate", { images, rate: rate.toFixed(1) }),
    p50 === null ? "" : say("load_times", { p50: duration(p50), p99: duration(p99) }),
    batch ? say("load_batch", { batch: batch.toFixed(1) }) : "",
    refused ? say("load_refused", { refused }) : "",
    say("load_end"),
  ].join("");
}

// ---- code, saving, theme ----------------------------------------------------------------------------------------------

function showCode() {
  if (!state.model) return;
  for (const language of LANGUAGES) {
    const tab = get(`tab-${language}`);
    const selected = language === state.language;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
  get("snippet-panel").setAttribute("aria-labelledby", `tab-${state.language}`);
  // Of a file that is no image nobody wants a program: of the one before it, then.
  const refused = ["INVALID_IMAGE", "UNSUPPORTED_MEDIA_TYPE"].includes(state.item?.error?.code);
  const shown = refused ? state.sendable ?? { file: "image.jpg" } : { file: state.item?.name ?? "image.jpg", type: state.item?.file?.type };
  get("snippet").textContent = snippet(state.language, { model: state.model.name, finds: state.model.finds, file: shown.file,
    type: shown.type || "image/jpeg", query: queryOf(threshold()) });
}

async function copy() {
  const text = get("snippet").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // Pages from http may not write to the clipboard; the user can, once it is selected.
    getSelection().selectAllChildren(get("snippet"));
    return;
  }
  get("copy").textContent = say("copied");
  setTimeout(() => { get("copy").textContent = say("copy"); }, 1500);
}

// What the service answers at the score that is set.
function shownAnswer() {
  const { answer, prediction } = state.item.result;
  return { ...answer, predictions: [chosenOf(prediction)] };
}

const stem = () => state.item.name.replace(/\.\w+$/, "");
const stemOfAll = () => state.items.length > 1 ? "results" : stem();
const json = (content) => new Blob([JSON.stringify(content, null, 2)], { type: "application/json" });

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

let theme = null;
function nextTheme() { setTheme({ null: "light", light: "dark", dark: null }[theme]); }
function setTheme(wanted) {
  theme = wanted;
  document.documentElement.dataset.theme = wanted || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const names = { null: say("auto"), light: say("light"), dark: say("dark") };
  get("theme").textContent = names[wanted];
  get("theme").setAttribute("aria-label", say("theme", { name: names[wanted] }));
  load.redraw();
}

start();
