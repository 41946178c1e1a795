// The page. Owns: what is shown, and what happens when somebody drops, chooses, types or turns something.
import { getJson, predict, ServiceError, setKey } from "./api.js";
import { Camera } from "./camera.js";
import { LANGUAGES, snippet } from "./code.js";
import { mapOf, placedIn } from "./draw.js";
import { Live } from "./live.js";
import { Load, spread } from "./load.js";
import { duration, element, lightEntry, listed, showFound, showTiming, summarise } from "./results.js";
import { Stage } from "./stage.js";

const LEAST_SCORE = 0.05; // Asked for; the slider chooses among what came, so that it acts at once.
const get = (id) => document.getElementById(id);
const state = { facts: null, models: [], model: null, image: null, file: "image.jpg", sendable: null, result: null, shown: [], language: "curl", number: 0 };

const stage = new Stage(get("canvas"), get("stage"), light);
const live = new Live(showStatus);
const load = new Load(() => ({ model: state.model.name, image: state.image, query: queryOf(threshold()) }), () => live.latest, loadEnded);
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
    if (model.finds === "tensors") label.title = "takes tensors, not images: POST /v2/models";
    input.addEventListener("change", () => choose(model));
    label.append(input, model.name);
    return label;
  }));
  showCode();
  showSamples();
}

function choose(model) {
  state.model = model;
  state.result = null;
  showSamples();
  showCode();
  if (camera.on) { stage.instances = []; stage.map = null; stage.caption = ""; show(); } else if (state.image) ask();
}

// ---- an image comes -------------------------------------------------------------------------------------------------

function wire() {
  get("choose").addEventListener("click", () => get("file").click());
  get("file").addEventListener("change", () => { if (get("file").files[0]) take(get("file").files[0]); get("file").value = ""; });
  get("camera").addEventListener("click", () => camera.on ? stopCamera() : startCamera());
  let depth = 0;
  addEventListener("dragenter", (event) => { event.preventDefault(); depth += 1; get("drop").classList.add("on"); });
  addEventListener("dragleave", () => { depth -= 1; if (depth <= 0) get("drop").classList.remove("on"); });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    get("drop").classList.remove("on");
    const file = event.dataTransfer.files[0];
    if (file) take(file); else showError(new Error("That was no file. Drop an image file, or paste the image itself."));
  });
  addEventListener("paste", (event) => {
    const item = [...event.clipboardData.items].find((each) => each.kind === "file");
    if (item) take(item.getAsFile());
  });
  get("threshold").addEventListener("input", () => { get("threshold-value").textContent = threshold().toFixed(2); show(); showCode(); });
  get("key-form").addEventListener("submit", (event) => { event.preventDefault(); get("key-box").open = false; get("key").blur(); });
  get("key").addEventListener("change", () => { setKey(get("key").value); showCode(); clearError(); readService().catch(showError); live.restart(); });
  get("theme").addEventListener("click", nextTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(theme));
  get("save-image").addEventListener("click", async () => save(await stage.save(), `${stem()}.anychip.png`));
  get("save-json").addEventListener("click", () => save(new Blob([JSON.stringify(shownAnswer(), null, 2)], { type: "application/json" }), `${stem()}.anychip.json`));
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
  if (known) get("known").textContent = `This is a demo: ${state.model.name} has seen drawings of ${known.length} shapes and nothing else (${known.join(", ")}). It takes a photograph for one of them.`;
  const rank = (sample) => Number(sample.task !== sampleTask());
  const ordered = [...state.facts.samples].sort((a, b) => rank(a) - rank(b) || a.name.localeCompare(b.name));
  get("samples").replaceChildren(...ordered.map(({ name }) => {
    const button = element("button");
    button.type = "button";
    const image = element("img");
    Object.assign(image, { src: `playground/samples/${name}`, alt: `Sample ${name.replace(/\.\w+$/, "").replaceAll("_", " ")}` });
    button.append(image);
    button.setAttribute("aria-pressed", String(state.file === name));
    button.addEventListener("click", async () => {
      const response = await fetch(image.src);
      take(new File([await response.blob()], name, { type: "image/jpeg" }));
    });
    return button;
  }));
}

async function take(file) {
  if (camera.on) stopCamera();
  clearError();
  state.image = file;
  state.file = file.name || "image.png";
  state.refused = false;
  state.result = null;
  [...get("samples").querySelectorAll("button")].forEach((button) => {
    button.setAttribute("aria-pressed", String(button.firstChild.src.endsWith(`/${state.file}`)));
  });
  get("empty").hidden = true;
  try {
    const bitmap = await createImageBitmap(file);
    if (state.image !== file) return;
    stage.show(bitmap, bitmap.width, bitmap.height);
  } catch { // The service may read what this browser does not, and says it if not.
    stage.clear();
    get("empty").hidden = false;
  }
  showCode();
  await ask();
}

async function ask() {
  const number = state.number += 1;
  const image = state.image;
  clearError();
  get("busy").hidden = false;
  try {
    const result = await predict(state.model.name, image, queryOf(LEAST_SCORE));
    result.map = await mapOf(result.prediction);
    if (number !== state.number) return;
    state.result = result;
    state.sendable = { file: state.file, type: image.type };
    show();
  } catch (error) {
    if (number !== state.number) return;
    state.result = null;
    stage.instances = [];
    stage.map = null;
    stage.caption = "";
    stage.draw();
    show();
    state.refused = error.code === "INVALID_IMAGE" || error.code === "UNSUPPORTED_MEDIA_TYPE";
    showCode();
    showError(await explained(error, image));
  } finally {
    if (number === state.number) get("busy").hidden = true;
  }
}

// A service that refuses a large body at its first bytes may close the connection before the browser has read why.
async function explained(error, image) {
  const most = state.facts?.max_body_bytes;
  if (error.code !== "UNREACHABLE" || !most || image.size <= most) return error;
  return new ServiceError(413, "BODY_TOO_LARGE", `the body is larger than the ${most} bytes that are read here`);
}

// ---- what was found -------------------------------------------------------------------------------------------------

function shownInstances(prediction) {
  return (placedIn(prediction)?.[1] || []).filter((found) => found.score >= threshold());
}

function show() {
  const result = state.result;
  const usable = Boolean(result) && Boolean(stage.source);
  get("save-image").disabled = !usable;
  get("save-json").disabled = !result;
  get("timing").hidden = !result;
  get("threshold-box").hidden = !(result && placedIn(result.prediction));
  if (!result) {
    get("summary").textContent = state.image ? "" : "Nothing has been asked yet.";
    get("found").replaceChildren();
    state.shown = [];
    get("canvas").setAttribute("aria-label", state.image ? `${state.file}, not yet answered` : "No image yet");
    return;
  }
  const { prediction, timing, totalMs } = result;
  const placed = Boolean(placedIn(prediction));
  state.shown = placed ? shownInstances(prediction) : listed(prediction);
  const text = summarise(prediction, state.shown);
  const summary = get("summary");
  summary.replaceChildren(element("strong", "", text), ` in ${duration(totalMs)}`);
  get("canvas").setAttribute("aria-label", `${state.file}: ${text}`);
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
  const meaning = state.facts?.errors[error.code]?.meaning;
  if (meaning) lines.push(element("p", "", meaning));
  const more = [error.retryAfter ? `try again in ${error.retryAfter} s` : "", error.requestId ? `request id ${error.requestId}` : ""].filter(Boolean).join(", ");
  if (more) lines.push(element("p", "hint", sentence(more)));
  if (error.status === 401) get("key-box").open = true;
  box.replaceChildren(...lines);
  box.hidden = false;
}

const sentence = (text) => text ? text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".") : "";
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
    showError(error.name === "NotAllowedError" ? new Error("The camera may not be used: the browser or you have said no.")
      : error.name === "NotFoundError" ? new Error("There is no camera here. Choose a file instead.") : error);
    return;
  }
  state.number += 1;
  state.image = null;
  state.result = null;
  state.file = "frame.jpg";
  get("busy").hidden = true;
  get("empty").hidden = true;
  get("camera-facts").hidden = false;
  get("camera").textContent = "Stop";
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
  state.result = { ...result, map, prediction: scaled(result.prediction, scale) };
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
  get("camera").textContent = "Camera";
  get("camera").setAttribute("aria-pressed", "false");
  get("camera-facts").hidden = true;
  get("summary").setAttribute("aria-live", "polite");
  const blob = still.width ? await new Promise((resolve) => still.toBlob(resolve, "image/jpeg", 0.92)) : null;
  if (blob && !state.image) await take(new File([blob], "frame.jpg", { type: "image/jpeg" }));
}

// ---- load -----------------------------------------------------------------------------------------------------------

function loadNote() {
  const images = Number(get("load-images").value);
  get("load-images-value").textContent = images;
  get("load-seconds-value").textContent = get("load-seconds").value;
  const parts = spread(images);
  const most = Math.max(...parts);
  get("load-note").textContent = most > 1
    ? `A browser opens few connections to a host, so ${parts.length} requests at a time carry up to ${most} images each. Latency is a request's.`
    : `${parts.length} ${parts.length === 1 ? "request" : "requests"} at a time, one image each.`;
}

async function startLoad() {
  clearError();
  if (camera.on) await stopCamera();
  if (!state.image) {
    const sample = state.facts?.samples.find((each) => each.task === sampleTask());
    if (!sample) return showError(new Error("Drop an image first."));
    const response = await fetch(`playground/samples/${sample.name}`);
    await take(new File([await response.blob()], sample.name, { type: "image/jpeg" }));
  }
  get("load-start").textContent = "Stop";
  get("load-summary").textContent = "";
  load.doneBefore = 0;
  await load.start(Number(get("load-images").value), Number(get("load-seconds").value));
}

function loadEnded({ images, refused, rate, p50, p99, batch, error }) {
  get("load-start").textContent = "Start";
  if (error) showError(error);
  const parts = [`${images} images, ${rate.toFixed(1)} a second`];
  if (p50 !== null) parts.push(`half of the requests within ${duration(p50)}, 99 % within ${duration(p99)}`);
  if (batch) parts.push(`batches of up to ${batch.toFixed(1)} images in the mean`);
  if (refused) parts.push(`${refused} refused`);
  get("load-summary").textContent = `${parts.join("; ")}.`;
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
  const shown = state.refused ? state.sendable ?? { file: "image.jpg" } : { file: state.file, type: state.image?.type };
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
  get("copy").textContent = "Copied";
  setTimeout(() => { get("copy").textContent = "Copy"; }, 1500);
}

// What the service answers at the score that is set.
function shownAnswer() {
  const { answer, prediction } = state.result;
  const [list] = placedIn(prediction) || [];
  const shown = list ? { ...prediction, [list]: state.shown } : prediction;
  return { ...answer, predictions: [shown] };
}

const stem = () => state.file.replace(/\.\w+$/, "");

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
  const names = { null: ["Auto", "as the system"], light: ["Light", "light"], dark: ["Dark", "dark"] };
  get("theme").textContent = names[wanted][0];
  get("theme").setAttribute("aria-label", `${names[wanted][0]}: colour theme`);
  load.redraw();
}

start();
