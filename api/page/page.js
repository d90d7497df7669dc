/** Ties the page together: the form, the options and the live view. */

import { Chat } from "./chat.js";
import { Live } from "./live.js";
import { storedKey, storeKey } from "./server.js";

const byId = (id) => document.getElementById(id);
const question = byId("question");
const options = byId("options");
const chat = new Chat(byId("messages"));
const live = new Live(heard);

function heard(problem) {
  if (problem?.status === 401) {
    setState(storedKey() ? "this key is not known" : "a key is needed");
    if (!askedForKey) openOptions();
    askedForKey = true;
  } else if (problem) {
    setState(problem.message);
  }
}
let askedForKey = false;

function setState(text) {
  const state = byId("state");
  state.textContent = text;
  state.classList.remove("good");
  state.classList.add("bad");
}

function openOptions() {
  byId("key").value = storedKey();
  options.showModal();
}

function closedOptions() {
  const key = byId("key").value.trim();
  if (key !== storedKey()) {
    storeKey(key);
    live.poll();
  }
  byId("key").value = "";
  byId("docs").hidden = Boolean(storedKey());
}

function requestFields() {
  const fields = { system: byId("system").value.trim() };
  if (byId("temperature").value !== "") fields.temperature = Number(byId("temperature").value);
  if (byId("max-tokens").value !== "") fields.max_tokens = Number(byId("max-tokens").value);
  return fields;
}

function setBusy(busy) {
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("messages").setAttribute("aria-busy", String(busy));
}

async function send(event) {
  event?.preventDefault();
  const text = question.value.trim();
  if (!text || chat.busy) return;
  byId("welcome").hidden = true;
  question.value = "";
  grow();
  setBusy(true);
  byId("said").textContent = "The model answers.";
  const failure = await chat.send(text, requestFields());
  if (chat.busy) return;
  setBusy(false);
  byId("said").textContent = failure ? failure.message : "The answer is complete.";
  if (failure) {
    question.value ||= text;
    grow();
  }
  if (failure?.status === 401) openOptions();
  question.focus({ preventScroll: true });
}

function grow() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}

byId("ask").addEventListener("submit", send);
question.addEventListener("input", grow);
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
byId("stop").addEventListener("click", () => chat.stop());
byId("new-chat").addEventListener("click", () => {
  chat.clear();
  setBusy(false);
  byId("welcome").hidden = false;
  question.focus();
});
byId("show-options").addEventListener("click", openOptions);
options.addEventListener("close", closedOptions);
byId("show-live").addEventListener("click", () => {
  const watching = document.body.classList.toggle("watching");
  byId("show-live").setAttribute("aria-expanded", String(watching));
  byId("show-live").textContent = watching ? "Chat" : "Live";
});
byId("theme").addEventListener("change", () => {
  const name = byId("theme").value;
  localStorage.setItem("mlx-troupe.theme", name);
  setTheme(name);
});

byId("theme").value = localStorage.getItem("mlx-troupe.theme") ?? "";
setTheme(byId("theme").value);
byId("docs").hidden = Boolean(storedKey());
live.poll();
