"use strict";
// The table is suspects.csv as it was written; the page changes two of its columns and saves it again.
const table = JSON.parse(document.getElementById("table").textContent);
const actionColumn = table.columns.indexOf("action");
const likelyColumn = table.columns.indexOf("likely_label");
const classes = new Set([...document.querySelectorAll("#classes option")].map((option) => option.value));
const articles = [...document.querySelectorAll("article")];
let isSaved = true;

function getDecision(article) {
  const form = article.querySelector("form");
  return { action: form.elements.action.value, likely: form.elements.likely_label.value };
}

function isUnknown({ action, likely }) {
  return action === "relabel" && !classes.has(likely);
}

function showDecisions() {
  const counts = { relabel: 0, drop: 0, keep: 0 };
  let unknown = 0;
  for (const article of articles) {
    const decision = getDecision(article);
    if (decision.action) counts[decision.action] += 1;
    article.classList.toggle("decided", decision.action !== "");
    article.querySelector("form").elements.likely_label.classList.toggle("unknown", isUnknown(decision));
    unknown += isUnknown(decision);
  }
  const undecided = articles.length - counts.relabel - counts.drop - counts.keep;
  const text = `relabel ${counts.relabel}, drop ${counts.drop}, keep ${counts.keep}, undecided ${undecided}`;
  document.getElementById("count").textContent = unknown ? `${text}; ${unknown} with an unknown class` : text;
  document.getElementById("save").disabled = unknown > 0;
}

// As vitrail.formatting.quote_cell and unquote_cell have it: no cell is read as a formula.
function quoteCell(text) {
  const plain = /^'*[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(plain) ? `"${plain.replaceAll('"', '""')}"` : plain;
}

function saveTable() {
  for (const article of articles) {
    const row = table.rows[Number(article.dataset.row)];
    const { action, likely } = getDecision(article);
    row[actionColumn] = action;
    if (action === "relabel") row[likelyColumn] = likely;
  }
  const lines = [table.columns, ...table.rows].map((row) => row.map(quoteCell).join(","));
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" }));
  link.download = "suspects.csv";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  isSaved = true;
}

for (const article of articles) {
  const form = article.querySelector("form");
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    if (event.target.name === "likely_label") form.elements.action.value = "relabel";
    isSaved = false;
    showDecisions();
  });
  form.addEventListener("reset", () => {
    isSaved = false;
    setTimeout(() => {
      for (const radio of form.elements.action) radio.checked = false;
      showDecisions();
    });
  });
}
document.getElementById("rest").addEventListener("click", () => {
  for (const article of articles) {
    if (!getDecision(article).action) article.querySelector("form").elements.action.value = "relabel";
  }
  isSaved = false;
  showDecisions();
});
document.getElementById("save").addEventListener("click", saveTable);
window.addEventListener("beforeunload", (event) => {
  if (!isSaved) event.preventDefault();
});
showDecisions();
