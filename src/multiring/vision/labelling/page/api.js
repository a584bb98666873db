// Requests to the server. An error has the status of the answer; 0 means that no answer came.
export class RequestError extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

async function request(path, options) {
  let answer;
  try { answer = await fetch(path, options); } catch { throw new RequestError(0, "The server does not answer."); }
  let told = {};
  try { told = await answer.json(); } catch { /* an answer that is no JSON has no text of ours */ }
  if (!answer.ok) throw new RequestError(answer.status, told.error || `The server answered ${answer.status}.`);
  return told;
}

export const get = (name, query = {}) => request(`/api/${name}?${new URLSearchParams(query)}`);
export const post = (name, told) =>
  request(`/api/${name}`, { method: "POST", headers: { "content-type": "application/json", "x-multiring": "label" }, body: JSON.stringify(told), keepalive: JSON.stringify(told).length < 60000 });
export const preview = (picture, side) =>
  `/picture?${new URLSearchParams({ path: picture.path, digest: picture.digest, side })}`;
