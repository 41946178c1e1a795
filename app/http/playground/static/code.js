// The request on the page as a program. Owns: its text in each language. Knows no element.
import { base, hasKey, predictPath } from "./api.js";

export const LANGUAGES = ["curl", "Python", "Browser", "Node", "tritonclient"];

// `request`: {model, query, file, type, finds}.
export function snippet(language, request) {
  const url = new URL(predictPath(request.model, request.query), base).href;
  const header = hasKey() ? "Authorization: Bearer YOUR_KEY" : "";
  return { curl, Python: python, Browser: browser, Node: node, tritonclient: triton }[language](request, url, header);
}

function curl({ file, type }, url, header) {
  return [`curl -H 'Content-Type: ${type}' --data-binary @${shell(file)}`, ...(header ? [`-H '${header}'`] : []), `'${url}'`].join(" \\\n  ");
}

// What is printed of an answer by each, and the tensor of the Open Inference Protocol.
const FOUND = {
  objects: { loop: 'for found in answer["predictions"][0]["detections"]:\n    print(found["label"], found["score"], found["box"])', tensor: "boxes" },
  classes: { loop: 'for found in answer["predictions"][0]["classes"]:\n    print(found["label"], found["score"])', tensor: "probabilities" },
  other: { loop: 'print(answer["predictions"][0])', tensor: "predictions" },
};

function python({ file, type, finds }, url, header) {
  const key = header ? ', "Authorization": "Bearer YOUR_KEY"' : "";
  return `import json
import urllib.request

with open(${JSON.stringify(file)}, "rb") as image:
    request = urllib.request.Request(
        ${JSON.stringify(url)},
        image.read(),
        {"Content-Type": "${type}"${key}},
    )
answer = json.load(urllib.request.urlopen(request))
${FOUND[finds].loop}`;
}

function browser(_, url, header) {
  return `// On a page of ${base.host}; one of another host must be named by --cors-origins.
const [image] = document.querySelector("input[type=file]").files;
const response = await fetch(${JSON.stringify(url)}, {
  method: "POST",${header ? '\n  headers: { Authorization: "Bearer YOUR_KEY" },' : ""}
  body: image,
});
const answer = await response.json();
if (!response.ok) throw new Error(answer.error);
console.log(answer.predictions[0]);`;
}

function node({ file, type }, url, header) {
  const key = header ? ', "Authorization": "Bearer YOUR_KEY"' : "";
  return `import { readFile } from "node:fs/promises";

const response = await fetch(${JSON.stringify(url)}, {
  method: "POST",
  headers: { "Content-Type": "${type}"${key} },
  body: await readFile(${JSON.stringify(file)}),
});
const answer = await response.json();
if (!response.ok) throw new Error(answer.error);
console.log(answer.predictions[0]);`;
}

function triton({ file, model, finds, query }, url, header) {
  const options = finds === "objects" ? `, parameters={"score_threshold": ${query.score_threshold}}` : "";
  const key = header ? `, headers={"Authorization": "Bearer YOUR_KEY"}` : "";
  return `import numpy as np
import tritonclient.http as triton

client = triton.InferenceServerClient("${base.host}")
with open(${JSON.stringify(file)}, "rb") as image:
    tensor = triton.InferInput("image", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([image.read()], dtype=np.object_))
answer = client.infer("${model}", [tensor]${options}${key})
print(answer.as_numpy("${FOUND[finds].tensor}"))`;
}

const shell = (file) => /^[\w./-]+$/.test(file) ? file : `'${file.replaceAll("'", "'\\''")}'`;
