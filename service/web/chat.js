// The chat page: one WebSocket for the turns, one small poll for the block pool. No framework, no build step.
// A turn is sent with the whole conversation; the prefix cache makes the repeated part free.

const $ = (id) => document.getElementById(id);
const conversation = $("conversation"), message = $("message"), send = $("send"), stop = $("stop");

const messages = []; // {role, content}, what the model sees
let socket = null, running = null, nextId = 1; // running: {id, turn, text, startedAt, tokens}

// ---------------------------------------------------------------- turns

function addTurn(role, text) {
  $("welcome")?.remove();
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  turn.append(document.createTextNode(text));
  conversation.append(turn);
  scrollToEnd(true);
  return turn;
}

function scrollToEnd(force) {
  const distance = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight;
  if (force || distance < 120) conversation.scrollTop = conversation.scrollHeight; // a reader who scrolled up stays there
}

function note(turn, text) {
  const line = document.createElement("span");
  line.className = "note";
  line.textContent = text;
  turn.append(line);
  scrollToEnd(false);
}

function showRunning() {
  stop.hidden = running === null;
  send.hidden = running !== null;
  send.disabled = socket?.readyState !== WebSocket.OPEN;
}

function submit() {
  const text = message.value.trim();
  if (!text || running || socket?.readyState !== WebSocket.OPEN) return;
  message.value = "";
  fitMessage();
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  const turn = addTurn("assistant", "");
  turn.classList.add("busy");
  running = { id: `turn-${nextId++}`, turn, text: "", tokens: 0, startedAt: performance.now(), firstAt: null };
  const system = $("system").value.trim();
  socket.send(JSON.stringify({
    type: "chat", id: running.id,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: Number($("temperature").value), top_p: Number($("top-p").value),
    repetition_penalty: Number($("repetition-penalty").value), max_tokens: Number($("max-tokens").value),
  }));
  showRunning();
  refreshSoon();
}

function cancel() {
  if (!running) return;
  socket.send(JSON.stringify({ type: "cancel", id: running.id }));
  end("stopped");
}

function end(reason) {
  const { turn, text, tokens, firstAt } = running;
  turn.classList.remove("busy");
  messages.push({ role: "assistant", content: text });
  const seconds = firstAt === null ? 0 : (performance.now() - firstAt) / 1000;
  const speed = tokens > 1 && seconds > 0 ? ` · ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  note(turn, `${reason}${tokens ? ` · ${tokens} tokens` : ""}${speed}`);
  running = null;
  showRunning();
  refreshSoon();
}

function fail(text) {
  running.turn.classList.add("failed");
  running.turn.classList.remove("busy");
  note(running.turn, text);
  if (running.text) messages.push({ role: "assistant", content: running.text });
  else messages.pop(); // the question was not answered; it is not part of what the model sees next
  running = null;
  showRunning();
}

// ---------------------------------------------------------------- socket

const handlers = {
  delta(event) {
    running.firstAt ??= performance.now();
    running.tokens += event.token_ids?.length ?? 0;
    running.text += event.text;
    running.turn.firstChild.appendData(event.text);
    if (event.finish_reason) running.finish = event.finish_reason;
    scrollToEnd(false);
  },
  finished() { end(running.finish === "length" ? "cut at the token limit" : "done"); },
  failed(event) { fail(event.message); },
};

function connect() {
  const url = new URL("ws", location.href);
  url.protocol = url.protocol.replace("http", "ws");
  const key = $("key").value.trim();
  socket = new WebSocket(url, key ? ["looseleaf", `bearer.${key}`] : ["looseleaf"]);
  socket.onopen = () => { showRunning(); refresh(); };
  socket.onmessage = (frame) => {
    const event = JSON.parse(frame.data);
    if (running && event.id === running.id) handlers[event.type]?.(event);
  };
  socket.onclose = (event) => {
    if (running) fail(event.reason || "the connection was lost");
    $("facts").textContent = "not connected; trying again…";
    showRunning();
    setTimeout(connect, 2000);
  };
}

// ---------------------------------------------------------------- block pool

let timer = null;

async function refresh() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const answer = await fetch("api/stats", { cache: "no-store" });
    if (answer.ok) showStats(await answer.json());
  } catch { /* the socket's close handler says that the server is away */ }
  timer = setTimeout(refresh, running ? 500 : 5000);
}

function refreshSoon() {
  clearTimeout(timer);
  timer = setTimeout(refresh, 100);
}

function showStats(stats) {
  const { pool } = stats;
  $("facts").textContent = `${stats.model} · ${stats.backend} · ${stats.dtype} · ${stats.running} running, ${stats.waiting} waiting`;
  const own = { used: pool.used - pool.shared, shared: pool.shared, cached: pool.cached, free: pool.free };
  for (const [part, blocks] of Object.entries(own)) {
    document.querySelector(`#strip [data-part="${part}"]`).style.flexBasis = `${(100 * blocks) / Math.max(1, pool.total)}%`;
  }
  for (const part of ["used", "shared", "cached", "free", "total"]) {
    document.querySelector(`dl [data-part="${part}"] dd`).textContent = pool[part].toLocaleString();
  }
  $("strip").setAttribute("aria-label", `Block pool: ${pool.used} of ${pool.total} blocks used, ${pool.cached} cached, ${pool.free} free`);
}

// ---------------------------------------------------------------- keys and buttons

function fitMessage() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight + 2}px`;
}

function newChat() {
  if (running) cancel();
  messages.length = 0;
  conversation.replaceChildren();
  message.focus();
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
message.addEventListener("input", fitMessage);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") cancel(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
stop.addEventListener("click", cancel);
$("new-chat").addEventListener("click", newChat);
$("key").addEventListener("change", () => socket.close()); // its close handler connects again, with the key
connect();
