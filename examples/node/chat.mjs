// Asks a Meshfire router one question and streams the answer. Only the contracts in ../../protos are shared with the
// services; nothing here is generated, and nothing needs Python.
//
//   node chat.mjs --address 127.0.0.1:50051 --model NAME [--max-tokens N] [--temperature T] "question"
//
// Text goes to stdout; usage, or the error's reason, to stderr. Exit code: 0 answered, 1 the call failed, 2 wrong usage.
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { parseArgs } from 'node:util';

import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const HERE = dirname(fileURLToPath(import.meta.url));
const PROTOS = process.env.MESHFIRE_PROTOS ?? join(HERE, '..', '..', 'protos');
const LOADING = { keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true, includeDirs: [PROTOS] };
const DETAILS_KEY = 'grpc-status-details-bin';

function readArguments() {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      address: { type: 'string' },
      model: { type: 'string' },
      'max-tokens': { type: 'string' },
      temperature: { type: 'string' },
    },
  });
  const question = positionals.join(' ');
  if (!values.address || !values.model || !question) throw new Error('--address, --model and a question are needed');
  return { ...values, question };
}

function requestOf({ model, question, temperature, 'max-tokens': maxTokens }) {
  // A field that is left out takes the model's own default.
  const sampling = {};
  if (temperature !== undefined) sampling.temperature = Number(temperature);
  if (maxTokens !== undefined) sampling.max_tokens = Number(maxTokens);
  return { model, chat: { messages: [{ role: 'user', content: question }] }, sampling };
}

function connect(address) {
  const definition = protoLoader.loadSync('meshfire/api/router/v1/inference_service.proto', LOADING);
  const { InferenceService } = grpc.loadPackageDefinition(definition).meshfire.api.router.v1;
  return new InferenceService(address, grpc.credentials.createInsecure());
}

// The machine-readable reason (google.rpc.ErrorInfo); a failure of the transport itself has none, only a status code.
function reasonOf(error) {
  const [bytes] = error.metadata?.get(DETAILS_KEY) ?? [];
  if (bytes) {
    const types = protoLoader.loadSync(join(HERE, 'status.proto'), LOADING);
    const { details } = types['example.Status'].deserialize(bytes);
    const info = details.find((detail) => detail.type_url.endsWith('/google.rpc.ErrorInfo'));
    if (info) return types['example.ErrorInfo'].deserialize(info.value).reason;
  }
  return grpc.status[error.code] ?? 'UNKNOWN';
}

async function answer(client, request) {
  const call = client.Generate(request);
  process.once('SIGINT', () => call.cancel());
  let finished;
  for await (const message of call) {
    if (message.event === 'delta') process.stdout.write(message.delta.text);
    if (message.event === 'finished') finished = message.finished;
  }
  if (!finished) throw new Error('the stream ended without its last message');
  return finished;
}

function report({ usage, finish_reason: finishReason }) {
  const numbers = `${usage.num_prompt_tokens} prompt tokens (${usage.num_cached_tokens} cached)`;
  process.stderr.write(`${numbers}, ${usage.num_output_tokens} output tokens, ${finishReason}\n`);
}

async function main() {
  let asked;
  try {
    asked = readArguments();
  } catch (error) {
    process.stderr.write(`${error.message}\n`);
    return 2;
  }
  const client = connect(asked.address);
  try {
    const finished = await answer(client, requestOf(asked));
    process.stdout.write('\n');
    report(finished);
    return 0;
  } catch (error) {
    process.stderr.write(`${reasonOf(error)}: ${error.details ?? error.message}\n`);
    return 1;
  } finally {
    client.close();
  }
}

process.exitCode = await main();
