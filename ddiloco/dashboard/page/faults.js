// The form that injects a fault; shown only where the server allows it and a run is under way.

import { byId, html } from "./format.js";

const ACTIONS = {
  // action: [what people call it, its own field, that field's label and first value]
  kill: ["kill"],
  stall: ["stand still"],
  slow: ["slow down", "factor", "times slower", 3],
  cut: ["cut off"],
  drop: ["lose messages", "share", "share of them", 0.5],
  delay: ["delay messages", "delay_seconds", "by seconds", 0.5],
  corrupt: ["flip bits", "share", "share of messages", 0.1],
  throttle: ["throttle links", "bits_per_second", "bits per second", 1000000],
  poison: ["poison pushes", "factor", "multiplied by", 100],
  disk: ["fill the disk"],
};
let roles = "";

export function showFaults(status) {
  byId("fault-form").hidden = !(
    status.allow_faults && ["starting", "running"].includes(status.phase)
  );
  const names = [
    ...status.islands.map((each) => [`learner-${each.number}`, `island ${each.number}`]),
    ...status.shards.map((each) => [`syncer-${each.number}`, `shard ${each.number}`]),
  ];
  if (roles === JSON.stringify(names)) return; // what is chosen stays chosen
  roles = JSON.stringify(names);
  byId("fault-role").replaceChildren(
    ...names.map(([value, text]) => html("option", { value }, text)),
  );
}

function choose() {
  const [, field, label, value] = ACTIONS[byId("fault-action").value];
  const more = byId("fault-more");
  more.hidden = !field;
  more.firstElementChild.textContent = label ?? "";
  byId("fault-amount").value = value ?? "";
}

async function inject(authorized) {
  const action = byId("fault-action").value,
    [, field] = ACTIONS[action];
  const fault = {
    action,
    role: byId("fault-role").value,
    seconds: Number(byId("fault-seconds").value),
  };
  if (field) fault[field] = Number(byId("fault-amount").value);
  try {
    const headers = authorized({ "Content-Type": "application/json" });
    const answer = await fetch("api/fault", {
      method: "POST",
      headers,
      body: JSON.stringify(fault),
    });
    return answer.ok ? "Asked for: it shows on the timeline when it strikes." : await answer.text();
  } catch {
    return "The server does not answer.";
  }
}

export function listenForFaults(authorized) {
  byId("fault-action").replaceChildren(
    ...Object.entries(ACTIONS).map(([value, [text]]) => html("option", { value }, text)),
  );
  byId("fault-action").addEventListener("change", choose);
  byId("fault-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    byId("fault-says").textContent = await inject(authorized);
  });
}
