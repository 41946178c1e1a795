// Continuous detection. Owns: the camera, frames under way and when a frame is too old to matter.
import { predict, ServiceError } from "./api.js";
import { say } from "./words.js";

const LONGEST_SIDE = 640; // Pixels of the frames that are sent; the picture on the page keeps the camera's own.
const IN_FLIGHT = 2; // One is computed while the next one travels.
const DEADLINE_MS = 500; // Older answers would lag behind what is seen.

export class Camera {
  // `request()`: {model, query}; `onFrame(video, prediction, scale)`, `onFacts(text)`, `onError(error)`.
  constructor(video, handlers) {
    this.video = video;
    Object.assign(this, handlers);
    this.stream = null;
    this.canvas = document.createElement("canvas");
  }

  get on() { return this.stream !== null; }

  async start() {
    if (!navigator.mediaDevices?.getUserMedia) {
      throw new Error(say("camera_insecure"));
    }
    this.stream = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment", width: { ideal: 1280 } }, audio: false });
    this.video.srcObject = this.stream;
    await this.video.play();
    Object.assign(this, { inFlight: 0, shownAt: 0, answered: [], dropped: 0, ages: [], abort: new AbortController() });
    this.loop();
  }

  stop() {
    this.abort?.abort();
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    this.stream = null;
    this.video.srcObject = null;
  }

  loop() {
    if (!this.on) return;
    if (this.video.readyState >= 2) {
      this.onDraw();
      if (this.inFlight < IN_FLIGHT && !this.encoding) this.ask();
    }
    this.facts();
    requestAnimationFrame(() => this.loop());
  }

  async ask() {
    const { video, canvas, abort } = this;
    const seenAt = performance.now();
    const scale = Math.min(1, LONGEST_SIDE / Math.max(video.videoWidth, video.videoHeight));
    canvas.width = Math.round(video.videoWidth * scale);
    canvas.height = Math.round(video.videoHeight * scale);
    canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
    this.inFlight += 1;
    this.encoding = true;
    try {
      const frame = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.85));
      this.encoding = false;
      const { model, query } = this.request();
      const left = Math.max(1, DEADLINE_MS - (performance.now() - seenAt));
      const result = await predict(model, frame, query, { signal: abort.signal, headers: { "X-Timeout-Ms": left.toFixed(0) } });
      const age = performance.now() - seenAt;
      if (!this.on || seenAt < this.shownAt || model !== this.request().model) { this.dropped += 1; return; }
      this.shownAt = seenAt;
      this.answered.push(performance.now());
      this.ages.push(age);
      this.onFrame(result, video.videoWidth / canvas.width);
    } catch (error) {
      if (error.name === "AbortError") return;
      if (error instanceof ServiceError && [429, 503, 504].includes(error.status)) {
        this.dropped += 1;
        await new Promise((resolve) => setTimeout(resolve, 100));
      } else {
        this.onError(error);
      }
    } finally {
      this.encoding = false;
      this.inFlight -= 1;
    }
  }

  facts() {
    const now = performance.now();
    this.answered = this.answered.filter((time) => now - time < 2000);
    this.ages = this.ages.slice(-20);
    const age = this.ages.length ? this.ages.reduce((sum, each) => sum + each, 0) / this.ages.length : 0;
    this.onFacts(say("camera_facts", { rate: (this.answered.length / 2).toFixed(1), age: age.toFixed(0), dropped: this.dropped }));
  }
}
