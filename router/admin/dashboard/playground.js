// A chat with the model through the public API, with the user's own key: one answer, or two with their own settings.
const Playground = (() => {
  const { node, seconds, count } = Nodes;
  const KEY = "baton-user-key", NUM_TOP = 5;
  const SETTINGS = [  // [name, label, attributes, whether it is whole]
    ["temperature", "Temperature", { min: 0, max: 2, step: "any", placeholder: "default" }],
    ["top_p", "Top-p", { min: 0, max: 1, step: "any", placeholder: "default" }],
    ["max_tokens", "Max tokens", { min: 1, step: 1, placeholder: "what fits" }],
    ["seed", "Seed", { step: 1, placeholder: "drawn" }],
  ];
  const CHAT_SAMPLING = { temperature: 0.8, top_k: 40, top_p: 0.95, min_p: 0.05 };  // as `baton chat` has it
  const plain = new Set();  // models without defaults of their own
  let number = 0;

  const labelled = (text, control) => {
    control.setAttribute("id", control.getAttribute("id") ?? `play-${(number += 1)}`);
    return node("div", { class: "field" }, node("label", { for: control.getAttribute("id") }, text), control);
  };
  const check = (text, id, isOn = false) => {
    const box = node("input", { type: "checkbox", id, ...(isOn ? { checked: "checked" } : {}) });
    return [box, node("label", { class: "check" }, box, " ", text)];
  };

  // The JSON of a field, undefined if it is empty. Throws with the field's name.
  function json(name, field) {
    if (!field.value.trim()) return undefined;
    try {
      return JSON.parse(field.value);
    } catch (error) {
      throw new Error(`${name}: ${error.message}`);
    }
  }

  // -- one answer -----------------------------------------------------------------------------------------------------

  const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -0.7 ? 0 : logprob > -5 ? 1 : 3)} %`;
  const shown = (token) => JSON.stringify(token);
  const odds = (one) => `${shown(one.token)} ${percent(one.logprob)}; ${one.top.map((other) => `${shown(other.token)} ${percent(other.logprob)}`).join(", ")}`;
  const shade = (logprob) => Math.min(4, Math.floor(-logprob / 0.5));

  // The tokens of a chunk, in the form of either API.
  function tokensOf(choice) {
    if (choice.logprobs?.content) return choice.logprobs.content.map((one) => ({ token: one.token, logprob: one.logprob, top: one.top_logprobs }));
    const { tokens = [], token_logprobs = [], top_logprobs } = choice.logprobs ?? {};
    return tokens.map((token, place) => ({
      token, logprob: token_logprobs[place],
      top: Object.entries(top_logprobs?.[place] ?? {}).map(([other, logprob]) => ({ token: other, logprob })).sort((a, b) => b.logprob - a.logprob),
    }));
  }

  // Text of which each token shows its probability, under the pointer and by the arrow keys.
  class TokenText {
    constructor(details) {
      this.element = node("p", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Answer. Arrow keys read its tokens' probabilities." });
      this.details = details;
      this.tokens = [];
      this.place = -1;
      this.element.addEventListener("keydown", (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!step || !this.tokens.length) return;
        event.preventDefault();
        this.show(Math.min(this.tokens.length - 1, Math.max(0, this.place + step)));
      });
    }

    show(place) {
      this.tokens[this.place]?.[0].classList.remove("current");
      this.place = place;
      const [span, one] = this.tokens[place];
      span.classList.add("current");
      this.details.textContent = odds(one);
    }

    // Tokens whose texts do not join to the chunk's, such as parts of a character, are shown as one piece.
    add(text, tokens) {
      if (!tokens.length) return this.element.append(text);
      const pieces = tokens.map((one) => one.token).join("") === text ? tokens.map((one) => [one.token, one]) : [[text, tokens.at(-1)]];
      for (const [piece, one] of pieces) {
        const span = node("span", { class: `token p-${shade(one.logprob)}`, title: odds(one) }, piece), place = this.tokens.length;
        span.addEventListener("pointerenter", () => this.show(place));
        this.tokens.push([span, one]);
        this.element.append(span);
      }
    }
  }

  // Calls of tools as they are streamed, with a field for the result of each.
  class ToolCalls {
    constructor() {
      this.element = node("div", { class: "calls" });
      this.calls = [];
    }

    add(deltas) {
      for (const delta of deltas) {
        const call = (this.calls[delta.index] ??= { id: "", name: "", arguments: "" });
        if (delta.id) call.id = delta.id;
        call.name += delta.function?.name ?? "";
        call.arguments += delta.function?.arguments ?? "";
      }
      const lines = this.calls.map((one) => node("p", {}, node("code", {}, `${one.name}(${one.arguments})`)));
      this.element.replaceChildren(...lines);
    }

    ask() {
      for (const call of this.calls) {
        call.field = node("textarea", { rows: "2", placeholder: "empty: null" });
        this.element.append(labelled(`Result of ${call.name}`, call.field));
      }
    }

    get message() {
      return this.calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    }

    get results() {
      return this.calls.map((one) => ({ role: "tool", tool_call_id: one.id, content: one.field.value || "null" }));
    }
  }

  // -- one column: its settings, its conversation ------------------------------------------------------------------------

  class Column {
    constructor(title, options) {
      this.options = options;
      this.model = node("input", { list: "play-models", placeholder: options.model, autocomplete: "off", spellcheck: "false", id: `play-${title}-model` });
      this.fields = Object.fromEntries(SETTINGS.map(([name, , attributes]) => [name, node("input", { type: "number", inputmode: "decimal", ...attributes, id: `play-${title}-${name}` })]));
      this.thread = node("div", { class: "thread" });
      this.element = node("section", { class: "column", "aria-label": `Answer ${title}` },
        node("div", { class: "settings" }, labelled("Model", this.model), ...SETTINGS.map(([name, label]) => labelled(label, this.fields[name]))), this.thread);
      this.reset();
    }

    get modelName() {
      return this.model.value.trim() || this.options.model;
    }

    reset() {
      this.messages = [];
      this.calls = null;
      this.thread.replaceChildren();
    }

    // The request's body for what somebody has typed.
    body({ text, system, tools, schema, wantsOdds }) {
      const given = { model: this.modelName, stream: true, stream_options: { include_usage: true, include_prefill_progress: true } };
      if (plain.has(given.model)) Object.assign(given, CHAT_SAMPLING);
      for (const [name] of SETTINGS) if (this.fields[name].value !== "") given[name] = Number(this.fields[name].value);
      if (!this.options.hasChat) return { ...given, prompt: text, ...(wantsOdds ? { logprobs: NUM_TOP } : {}) };
      if (system && !this.messages.length) this.messages.push({ role: "system", content: system });
      if (this.calls) this.messages.push(...this.calls.results);
      this.calls = null;
      if (text) this.messages.push({ role: "user", content: text });
      return {
        ...given, messages: this.messages, ...(wantsOdds ? { logprobs: true, top_logprobs: NUM_TOP } : {}), ...(tools ? { tools } : {}),
        ...(schema ? { response_format: { type: "json_schema", json_schema: { name: "answer", schema } } } : {}),
      };
    }

    // Resolves to whether there was an answer.
    async send(asked, headers, signal) {
      const length = this.messages.length, calls = this.calls, body = this.body(asked);
      const facts = node("p", { class: "dim facts", role: "status" }, "waits ..."), details = node("p", { class: "dim odds" });
      const text = new TokenText(details), thought = node("p", { class: "dim thought" }), tools = new ToolCalls();
      const answer = node("article", { class: "answer" }, thought, text.element, tools.element, details, facts);
      this.thread.append(...(asked.text ? [node("p", { class: "question" }, asked.text)] : []), answer);
      const began = performance.now();
      let content = "", first = null, usage = null, finish = "", name = "";
      try {
        const response = await fetch(this.options.hasChat ? "v1/chat/completions" : "v1/completions", {
          method: "POST", headers: { "content-type": "application/json", ...headers }, body: JSON.stringify(body), signal, credentials: "omit",
        });
        name = response.headers.get("x-baton-request-id") ?? "";
        for await (const chunk of events(response)) {
          usage = chunk.usage ?? usage;
          if (chunk.prefill_progress) facts.textContent = `reads the prompt: ${count(chunk.prefill_progress.computed_tokens)} of ${count(chunk.prefill_progress.total_tokens)} tokens`;
          const [choice] = chunk.choices ?? [];
          if (!choice) continue;
          const piece = choice.delta?.content ?? choice.text ?? "";
          finish = choice.finish_reason ?? finish;
          if (piece || choice.delta?.reasoning_content || choice.delta?.tool_calls) first ??= performance.now();
          if (choice.delta?.reasoning_content) thought.append(choice.delta.reasoning_content);
          if (piece) text.add(piece, tokensOf(choice));
          if (choice.delta?.tool_calls) tools.add(choice.delta.tool_calls);
          content += piece;
        }
        this.messages.push({ role: "assistant", content, ...(tools.calls.length ? { tool_calls: tools.message } : {}) });
        if (tools.calls.length) {
          tools.ask();
          this.calls = tools;
        }
        const took_s = (performance.now() - (first ?? began)) / 1000, wait_s = first === null ? null : (first - began) / 1000;
        facts.replaceChildren(...(body.model === this.options.model ? [] : [`${body.model}. `]), ...summary({ usage, finish, wait_s, took_s }));
        await served(facts, name, this.options);
        return true;
      } catch (error) {
        this.messages.length = length;  // an answer that failed is no part of the conversation
        this.calls = calls;
        facts.className = "bad facts";
        facts.textContent = signal.aborted ? "stopped" : error.message;
        return false;
      }
    }
  }

  function summary({ usage, finish, wait_s, took_s }) {
    const output = usage?.completion_tokens ?? 0, cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const speed = output > 1 && took_s ? `, ${((output - 1) / took_s).toFixed(1)} tokens/s` : "";
    return [`${finish}: first token after ${seconds(wait_s)}${speed}; ${count(usage?.prompt_tokens ?? 0)} prompt tokens, ${count(cached)} of them cached; ${count(output)} tokens written`];
  }

  // The workers are the administrators' to see: with a user's key alone the request's name is shown.
  async function served(facts, name, { admin, explain }) {
    if (!name) return;
    const [job] = (await admin(`admin/requests/${encodeURIComponent(name)}`).catch(() => null))?.jobs ?? [];
    if (!job) return facts.append(node("br"), `request ${name}`);
    const way = job.prefill ? `${job.prefill} prefilled, ${job.decode} decoded` : `${job.decode} did both`;
    const link = node("button", { type: "button", class: "link" }, "Timeline");
    link.addEventListener("click", () => explain(name));
    facts.append(node("br"), `${way}; ${count(job.cached_tokens)} of ${count(job.prompt_tokens)} prompt tokens from ${job.prefill ?? job.decode}'s cache. `, link);
  }

  // Models and adapters, without other names of them; none where the key is wrong, which the next answer tells.
  async function modelNames(headers) {
    const response = await fetch("v1/models", { headers, credentials: "omit" }).catch(() => null);
    const { data } = response?.ok ? await response.json() : { data: [] };
    for (const one of data) if (!Object.keys(one.default_sampling ?? { unknown: 0 }).length) plain.add(one.id);
    return data.filter((one) => one.id === one.root || one.parent).map((one) => one.id);
  }

  // The JSON of each event of a stream. Throws the server's error, of the response or in the stream.
  async function* events(response) {
    if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `The gateway answered ${response.status}`);
    const reader = response.body.getReader(), decoder = new TextDecoder();
    let buffer = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Error("The gateway broke the answer off");
      const lines = (buffer + decoder.decode(value, { stream: true })).split("\n");
      buffer = lines.pop();
      for (const line of lines.filter((one) => one.startsWith("data: "))) {
        if (line === "data: [DONE]") return;
        const chunk = JSON.parse(line.slice(6));
        if (chunk.error) throw new Error(chunk.error.message);
        yield chunk;
      }
    }
  }

  // -- the form -------------------------------------------------------------------------------------------------------

  // `options`: model, hasChat, asksForKeys; admin(path) gets JSON as an administrator; explain(name) shows a request.
  function mount(place, options) {
    const columns = ["A", "B"].map((title) => new Column(title, options));
    const key = node("input", { type: "password", autocomplete: "off", spellcheck: "false", id: "play-key" });
    const system = node("textarea", { rows: "1", id: "play-system" }), text = node("textarea", { rows: "3", id: "play-text" });
    const tools = node("textarea", { rows: "6", spellcheck: "false", id: "play-tools" });
    const schema = node("textarea", { rows: "6", spellcheck: "false", id: "play-schema" });
    const [twice, twiceLabel] = check("Two answers side by side", "play-twice"), [wantsOdds, oddsLabel] = check("Token probabilities", "play-odds", true);
    const send = node("button", { id: "play-send" }, "Send"), stop = node("button", { type: "button", hidden: "hidden" }, "Stop"), anew = node("button", { type: "button" }, "New chat");
    const trouble = node("p", { class: "bad", role: "alert", hidden: "hidden" }), models = node("datalist", { id: "play-models" });
    const headers = () => (key.value ? { authorization: `Bearer ${key.value.trim()}` } : {});
    const answers = node("div", { class: "columns" }, ...columns.map((one) => one.element));
    const further = node("details", {}, node("summary", {}, "System message, tools, schema"), labelled("System message", system),
      labelled("Tools, as the JSON of \"tools\"", tools), labelled("Schema of the answer, as JSON", schema));
    const form = node("form", { class: "play" }, ...(options.asksForKeys ? [labelled("Your API key", key)] : []),
      labelled(options.hasChat ? "Message (Ctrl-Enter sends)" : "Prompt (Ctrl-Enter sends)", text), ...(options.hasChat ? [further] : []),
      node("div", { class: "line" }, send, stop, anew, twiceLabel, oddsLabel), trouble);
    let controller = null;
    columns[1].element.hidden = true;
    key.value = sessionStorage.getItem(KEY) ?? "";
    twice.addEventListener("change", () => {
      columns[1].element.hidden = !twice.checked;
      answers.className = twice.checked ? "columns two" : "columns";
    });
    for (const one of columns) one.model.addEventListener("focus", async () => {
      const names = await modelNames(headers());
      models.replaceChildren(...names.map((name) => node("option", { value: name })));
    });
    stop.addEventListener("click", () => controller?.abort());
    anew.addEventListener("click", () => {
      controller?.abort();
      for (const one of columns) one.reset();
      text.focus();
    });
    text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (controller) return;
      trouble.hidden = true;
      const used = columns.filter((one) => !one.element.hidden);
      try {
        const asked = { text: text.value, system: system.value.trim(), tools: json("Tools", tools), schema: json("Schema", schema), wantsOdds: wantsOdds.checked };
        if (!asked.text.trim() && !used.some((one) => one.calls)) throw new Error("The message is empty: write one");
        if (key.value) sessionStorage.setItem(KEY, key.value.trim());
        controller = new AbortController();
        [send.disabled, stop.hidden] = [true, false];
        await modelNames(headers());  // for `plain`
        const answered = await Promise.all(used.map((one) => one.send(asked, headers(), controller.signal)));
        if (options.hasChat && answered.some((one) => one)) text.value = "";
      } catch (error) {
        trouble.textContent = error.message;
        trouble.hidden = false;
      } finally {
        controller = null;
        [send.disabled, stop.hidden] = [false, true];
      }
    });
    place.replaceChildren(form, answers, models);
  }

  return { mount };
})();
