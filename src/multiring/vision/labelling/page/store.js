// The current picture and its changes on their way to the server. Changes are sent one at a time, each with the number
// of the change that it builds on. What the server has not confirmed is kept in the tab's storage, so that a reload
// or a server that was killed loses nothing.
import { get, post } from "./api.js";

const kept = (name, value) => {
  if (value === undefined) return JSON.parse(sessionStorage.getItem(name) || "null");
  if (value === null) sessionStorage.removeItem(name); else sessionStorage.setItem(name, JSON.stringify(value));
  return value;
};
const UNSAVED = "multiring.unsaved", DONE = "multiring.done";
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

export class Store extends EventTarget {
  picture = null; // the state as of the server
  labels = null; // what the person sees: the server's labels with the edits that wait
  proposals = [];
  queue = [];
  conflict = null; // the labels of somebody else
  problem = "";
  author = "";
  redo = [];
  #sending = null;

  changed() { this.dispatchEvent(new Event("change")); }

  async open(path) {
    if (!(await this.settled())) return false;
    const state = await get("picture", { path });
    this.#take(state);
    this.conflict = null; this.problem = ""; this.redo = [];
    const left = kept(UNSAVED);
    if (left && left.path === path) {
      if (same(left.labels, state.labels)) kept(UNSAVED, null); // it had been saved, and only the answer was lost
      else if (left.after === state.change && left.digest === state.digest) this.edit([{ do: "set", labels: left.labels }], left.labels);
      else { this.conflict = state; this.labels = left.labels; }
    }
    this.changed();
    return true;
  }

  unsavedPath() { return kept(UNSAVED)?.path; }

  #take(state) { this.picture = state; this.labels = state.labels; this.proposals = state.proposals; }

  // `edits` go to the server, and `labels` is what they make of the labels that the person sees.
  edit(edits, labels, isRedo = false) {
    if (this.conflict) return;
    if (!isRedo) this.redo = [];
    this.labels = labels;
    this.queue.push({ edits, labels });
    this.#keep();
    this.changed();
    this.#sending ??= this.#send().finally(() => { this.#sending = null; });
  }

  #keep() {
    kept(UNSAVED, this.queue.length || this.conflict ? { path: this.picture.path, digest: this.picture.digest, after: this.picture.change, labels: this.labels } : null);
  }

  async #send() {
    while (this.queue.length && !this.conflict) {
      const { edits, labels } = this.queue[0];
      const { path, digest, change } = this.picture;
      try {
        const state = await post("edit", { path, digest, after: change, author: this.author, edits });
        this.#saved(state);
      } catch (error) {
        if (error.status === 409) {
          const state = await get("picture", { path }).catch(() => null);
          if (state && same(state.labels, labels) && state.digest === digest) { this.#saved(state); continue; }
          if (state) { this.conflict = state; this.queue = []; this.#keep(); }
          else this.problem = error.message;
        } else if (error.status === 400) {
          this.queue = []; this.labels = this.picture.labels; this.problem = `Refused: ${error.message}`; this.#keep();
        } else {
          this.problem = `Not saved yet: ${error.message} The page tries again.`;
          this.changed();
          await new Promise((done) => { setTimeout(done, 1000); });
        }
        this.changed();
      }
    }
    this.changed();
  }

  #saved(state) {
    if (state.change > this.picture.change) kept(DONE, [...(kept(DONE) || []).slice(-499), state.change]);
    this.queue.shift();
    this.problem = "";
    const proposals = this.proposals; // those that wait for an answer stay on the page
    this.picture = state;
    if (!this.queue.length) this.labels = state.labels;
    this.proposals = proposals;
    this.counts = state.counts || this.counts;
    this.#keep();
    this.dispatchEvent(new CustomEvent("saved", { detail: state }));
  }

  // Whether everything is on the server.
  async settled() {
    const limit = Date.now() + 3000;
    while (this.#sending && Date.now() < limit) await new Promise((done) => { setTimeout(done, 15); });
    return !this.queue.length && !this.conflict;
  }

  resolve(isMine) {
    const [theirs, mine] = [this.conflict, this.labels];
    this.conflict = null;
    this.#take(theirs);
    this.#keep();
    if (isMine) this.edit([{ do: "set", labels: mine }], mine);
    this.changed();
  }

  async undo() {
    if (!(await this.settled())) return null;
    const done = kept(DONE) || [];
    if (!done.length) throw new Error("This tab has changed nothing that can be undone.");
    const before = this.labels;
    const { paths } = await post("undo", { author: this.author, change: done.at(-1) });
    kept(DONE, done.slice(0, -1));
    const redo = paths.includes(this.picture.path) ? [...this.redo, before] : [];
    const path = paths.includes(this.picture.path) ? this.picture.path : paths[0];
    await this.open(path);
    this.redo = redo;
    return path;
  }

  again() {
    const labels = this.redo.pop();
    if (labels !== undefined) this.edit([{ do: "set", labels }], labels, true);
  }

  noteChange(number) { if (number) kept(DONE, [...(kept(DONE) || []).slice(-499), number]); }
}
