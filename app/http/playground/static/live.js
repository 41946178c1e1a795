// The live panel. Owns: the stream of /v1/stats and how it looks. Nothing is asked while the page is hidden.
import { events, getJson } from "./api.js";
import { element } from "./results.js";
import { say } from "./words.js";

const RETRY_MS = 3000;
const unfolded = new Set();
const gib = (bytes) => bytes === null || bytes === undefined ? "–" : `${(bytes / 2 ** 30).toFixed(bytes < 2 ** 30 ? 2 : 1)} GiB`;
const sum = (counts) => Object.values(counts).reduce((total, each) => total + each, 0);

export class Live {
  // `onState("ready" | "down" | "", text)` for the line at the top.
  constructor(onState) {
    this.onState = onState;
    this.latest = null;
    this.models = [];
    this.abort = null;
    document.addEventListener("visibilitychange", () => document.hidden ? this.pause() : this.follow());
  }

  pause() {
    this.abort?.abort();
    this.abort = null;
  }

  restart() {
    this.pause();
    this.follow();
  }

  async follow() {
    if (this.abort || document.hidden) return;
    const abort = this.abort = new AbortController();
    const note = document.getElementById("live-note");
    while (!abort.signal.aborted) {
      try {
        await this.readModels();
        note.textContent = say("twice");
        await events("v1/stats/stream", (stats) => this.show(stats), abort.signal);
      } catch (error) {
        if (error.name === "AbortError" || abort.signal.aborted) return;
        note.textContent = error.message;
        if (error.code === "UNREACHABLE") this.onState("down", say("down"));
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  }

  async readModels() {
    this.models = (await getJson("v1/models")).models;
    this.devices = (await getJson("v1/devices")).devices;
    const used = [...new Set(this.models.flatMap((model) => model.served_on.map((on) => `${on.device} ${on.engine} ${on.precision}`)))];
    const ready = this.models.length > 0 && this.models.every((model) => model.ready);
    this.onState(ready ? "ready" : "down", `${ready ? say("ready") : say("not_ready")}${used.length ? ` · ${used.slice(0, 3).join(", ")}` : ""}`);
    this.describedAt = performance.now();
  }

  show(stats) {
    const before = this.latest;
    this.latest = stats;
    const described = stats.ready === before?.ready && performance.now() - this.describedAt < 10000;
    if (!described) this.readModels().catch(() => {});
    const focused = document.activeElement?.closest("details")?.dataset.key;
    document.getElementById("devices").replaceChildren(...stats.devices.map((device) => this.device(device)));
    if (focused) document.querySelector(`details[data-key="${CSS.escape(focused)}"] summary`)?.focus({ preventScroll: true });
    const elapsed = before ? stats.uptime_s - before.uptime_s : 0;
    this.rates = elapsed > 0 ? this.rates || {} : {};
    const rows = stats.models.map((model) => this.row(model, before?.models.find((each) => each.model === model.model), elapsed));
    document.querySelector("#live-models tbody").replaceChildren(...rows);
  }

  row(model, past, elapsed) {
    const rate = (now, then) => past && elapsed > 0 ? ((now - then) / elapsed).toFixed(1) : "–";
    const batches = past ? model.batches - past.batches : 0;
    const errors = sum(model.requests) - (model.requests.OK || 0) - (model.requests.CANCELLED || 0);
    const row = element("tr");
    row.append(...[
      model.model,
      rate(sum(model.requests), past ? sum(past.requests) : 0),
      rate(model.images, past?.images),
      batches > 0 ? ((model.images_computed - past.images_computed) / batches).toFixed(1) : "–",
      `${model.queue_depth + model.queue_reserved}/${model.queue_limit}`,
      String(errors),
    ].map((text) => element("td", "", text)));
    return row;
  }

  device(device) {
    const card = element("div", "device");
    const named = this.devices?.find((each) => each.device === device.device);
    const title = element("h3", "", device.device);
    title.append(element("small", "", [named?.name, device.vendor, named?.simulated ? say("simulated") : ""].filter(Boolean).join(" · ")));
    card.append(title);
    const memory = device.memory_bytes, machine = device.device.startsWith("cpu"); // Other programs' part counts as well.
    if (memory.used !== null && memory.total) card.append(meter(machine ? say("machine_memory") : say("memory"), memory.used / memory.total, say("of", { used: gib(memory.used), total: gib(memory.total) })));
    if (device.utilization_ratio !== null) card.append(meter(machine ? say("machine_busy") : say("busy"), device.utilization_ratio, `${(device.utilization_ratio * 100).toFixed(0)} %`));
    const facts = element("p", "facts");
    const fact = (name, value) => {
      const part = element("span", "", `${name} `);
      part.append(element("b", "", value));
      facts.append(part);
    };
    fact(say("workers"), String(device.workers));
    fact(say("restarts"), String(sum(device.restarts)));
    fact(say("handovers"), String(sum(device.handovers)));
    if (device.worker_resident_bytes !== null) fact(say("workers_memory"), gib(device.worker_resident_bytes));
    if (device.power_watts !== null) fact(say("power"), `${device.power_watts.toFixed(0)} W`);
    if (device.temperature_celsius !== null) fact(say("temperature"), `${device.temperature_celsius.toFixed(0)} °C`);
    card.append(facts);
    for (const model of this.models) {
      for (const on of model.served_on.filter((each) => each.device === device.device)) card.append(servedOn(model, on));
    }
    return card;
  }
}

function meter(name, share, text) {
  const row = element("div", "meter");
  const track = element("span", "track");
  const fill = element("span", "fill");
  fill.style.width = `${Math.min(100, share * 100)}%`;
  track.append(fill);
  row.append(element("span", "", name), track, element("b", "", text));
  return row;
}

// Engine and precision; what the precision gate has found and refused is for those who unfold it.
function servedOn(model, on) {
  const row = element("div", "served");
  const line = element("p");
  line.append(element("b", "", model.name), say("weights", { ...on, weights: model.weights }));
  const worst = Object.entries(on.errors).map(([name, value]) => `${name.replaceAll("_", " ")} ${+value.toPrecision(2)}`);
  const refused = Object.entries(on.refusals).map(([name, reason]) => element("p", "refused", say("gate_refused", { name, reason })));
  const key = `${on.device} ${model.name}`;
  row.append(line);
  if (!worst.length && !refused.length) return row;
  const more = element("details");
  more.open = unfolded.has(key); // The panel is drawn anew twice a second.
  more.dataset.key = key;
  more.addEventListener("toggle", () => unfolded[more.open ? "add" : "delete"](key));
  more.append(element("summary", "pass", worst.length ? say("checked") : say("not_checked")), ...refused);
  if (worst.length) more.append(element("p", "", say("largest", { errors: worst.join(", ") })));
  row.append(more);
  return row;
}
