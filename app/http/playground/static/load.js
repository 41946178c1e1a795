// "Make it sweat": so many images at a time for some seconds. Owns: the load, its figures and their charts.
import { predictPath, send, ServiceError } from "./api.js";
import { drawChart } from "./chart.js";

const CONNECTIONS = 5; // A browser opens six to a host, and the live numbers use one.
const TICK_MS = 250;

const get = (id) => document.getElementById(id);
const quantile = (sorted, share) => sorted.length ? sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] : null;

// How many images each of the requests under way carries, so that together they are `images`.
export function spread(images) {
  const requests = Math.min(images, CONNECTIONS);
  return Array.from({ length: requests }, (_, i) => Math.floor(images / requests) + (i < images % requests ? 1 : 0));
}

function showFigures({ rate, p50, p99, batch, refused }) {
  get("figure-rate").textContent = rate.toFixed(1);
  get("figure-p50").textContent = p50?.toFixed(0) ?? "–";
  get("figure-p99").textContent = p99?.toFixed(0) ?? "–";
  get("figure-batch").textContent = batch?.toFixed(1) ?? "–";
  get("figure-refused").textContent = refused;
}

export class Load {
  // `latestStats()`: the last event of the live numbers, or null. `current()`: {model, image, query}.
  constructor(current, latestStats, onEnd) {
    Object.assign(this, { current, latestStats, onEnd, running: null });
  }

  async start(images, seconds) {
    const { model, image, query } = this.current();
    const abort = new AbortController();
    this.running = abort;
    const state = { done: 0, refused: 0, latencies: [], all: [], model };
    this.history = { rate: [], p50: [], p99: [], batch: [] };
    this.slots = Math.ceil(seconds * 1000 / TICK_MS);
    this.batchPeak = 0;
    get("load-figures").hidden = get("charts").hidden = false;
    get("figure-batch").textContent = "–";
    const started = performance.now(), until = started + seconds * 1000;
    let before = this.counts(model), last = started;
    const tick = setInterval(() => {
      const now = performance.now();
      before = this.tick(state, now - last, before);
      last = now;
    }, TICK_MS);
    try { // Requests under way at the end are waited for: what was computed counts.
      await Promise.all(spread(images).map((count) => this.repeat(model, image, query, count, until, state, abort.signal)));
    } finally {
      clearInterval(tick);
      this.running = null;
      const elapsed = performance.now() - started;
      state.all.sort((a, b) => a - b);
      const whole = { images: state.done, refused: state.refused, rate: state.done / elapsed * 1000, p50: quantile(state.all, 0.5),
        p99: quantile(state.all, 0.99), batch: this.batchPeak || null, error: state.error };
      showFigures(whole); // Not the last instant's, which would contradict the summary below.
      this.onEnd(whole);
    }
  }

  stop() { this.running?.abort(); }

  async repeat(model, image, query, count, until, state, signal) {
    let body = image, headers = { "Content-Type": image.type || "application/octet-stream" };
    if (count > 1) {
      body = new FormData();
      for (let i = 0; i < count; i += 1) body.append("file", image, `${i}`);
      headers = {};
    }
    while (performance.now() < until && !signal.aborted && !state.error) {
      const started = performance.now();
      try {
        const response = await send(predictPath(model, query), { method: "POST", body, headers, signal });
        await response.arrayBuffer();
        const took = performance.now() - started;
        state.done += count;
        state.latencies.push(took);
        state.all.push(took);
      } catch (error) {
        if (error.name === "AbortError") return;
        if (!(error instanceof ServiceError) || ![429, 503, 504].includes(error.status)) { state.error = error; return; }
        state.refused += count;
        await new Promise((resolve) => setTimeout(resolve, 50));
      }
    }
  }

  counts(model) {
    const stats = this.latestStats();
    const found = stats?.models.find((each) => each.model === model);
    return found ? { images: found.images_computed, batches: found.batches } : null;
  }

  tick(state, elapsedMs, before) {
    const sorted = state.latencies.splice(0).sort((a, b) => a - b);
    const rate = (state.done - (this.doneBefore ?? 0)) / elapsedMs * 1000;
    this.doneBefore = state.done;
    if (this.history.rate.length === 0 && rate < 0) this.doneBefore = 0;
    const now = this.counts(state.model);
    const batches = now && before ? now.batches - before.batches : 0;
    const batch = batches > 0 ? (now.images - before.images) / batches : this.history.batch.at(-1) ?? null;
    if (batches > 0) this.batchPeak = Math.max(this.batchPeak, batch);
    this.history.rate.push(Math.max(0, rate));
    this.history.p50.push(quantile(sorted, 0.5) ?? this.history.p50.at(-1) ?? null);
    this.history.p99.push(quantile(sorted, 0.99) ?? this.history.p99.at(-1) ?? null);
    this.history.batch.push(batch);
    this.show(state);
    return batches > 0 || !before ? now : before;
  }

  show(state) {
    const { rate, p50, p99, batch } = this.history;
    const recent = rate.slice(-4);
    showFigures({ rate: recent.reduce((sum, each) => sum + each, 0) / recent.length, p50: p50.at(-1), p99: p99.at(-1),
      batch: batch.at(-1), refused: state.refused });
    this.redraw();
  }

  redraw() {
    if (!this.history) return;
    const { rate, p50, p99, batch } = this.history;
    drawChart(get("chart-rate"), [{ values: rate, colour: "--accent", kind: "area" }], this.slots);
    drawChart(get("chart-latency"), [{ values: p99, colour: "--warn", kind: "line" }, { values: p50, colour: "--accent", kind: "line" }], this.slots);
    drawChart(get("chart-batch"), [{ values: batch, colour: "--c-post", kind: "bars" }], this.slots);
  }
}
