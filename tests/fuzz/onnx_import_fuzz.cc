// Coverage-guided fuzzing of the importer (libFuzzer): whatever the bytes, loading and binding a
// model ends in a Graph or in trainrt::Error, without a fault that ASan or UBSan sees.
//
// Random bytes rarely parse as protobuf, so half of the mutations are made on the parsed message:
// a random field of a random submessage is changed, dropped, doubled or swapped with another.
#include <google/protobuf/message.h>
#include <onnx/onnx_pb.h>

#include <random>
#include <string>
#include <vector>

#include "graph/base/log.h"
#include "graph/onnx_import.h"
#include "graph/training_graph.h"

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

// Import as `run`, `eval` and `inspect` do it; what they refuse is refused by trainrt::Error.
template <typename Function>
void allow_refusal(Function&& function) {
  try {
    function();
  } catch (const trainrt::Error& error) {
    // kInternal is a broken invariant of ours, not bad input.
    if (error.code() == trainrt::ErrorCode::kInternal) {
      __builtin_trap();
    }
  }
}

void import_model(const std::string& bytes) {
  const trainrt::OnnxModel model = trainrt::OnnxModel::parse_text(bytes);
  trainrt::BindOptions options;
  for (const std::string& symbol : model.symbols()) {
    options.dims[symbol] = 3;
  }
  options.batch = 2;
  model.hash();
  allow_refusal([&] { model.tensors(options); });
  allow_refusal([&] {
    options.training = false;
    model.bind(options);
  });
  allow_refusal([&] {
    options.training = true;
    trainrt::Graph graph = model.bind(options);
    trainrt::TrainingSpec spec;
    spec.loss = trainrt::resolve_loss(graph, {}, nullptr);
    build_training_graph(std::move(graph), spec);
  });
  if (model.has_training_info()) {
    allow_refusal([&] {
      const bool sums_samples = loss_of_training_info(model, options).sums_samples;
      build_from_training_info(model, options, true, sums_samples);
    });
  }
}

// All messages of a model in which something can be changed, outermost first.
void collect(Message* message, std::vector<Message*>& all) {
  all.push_back(message);
  const Reflection& reflection = *message->GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(*message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
      continue;
    }
    if (!field->is_repeated()) {
      collect(reflection.MutableMessage(message, field), all);
      continue;
    }
    for (int i = 0; i < reflection.FieldSize(*message, field); ++i) {
      collect(reflection.MutableRepeatedMessage(message, field, i), all);
    }
  }
}

class Mutator {
 public:
  Mutator(onnx::ModelProto& model, unsigned seed) : model_(model), random_(seed) {}

  void mutate() {
    const uint64_t changes = 1 + below(3);
    for (uint64_t i = 0; i < changes; ++i) {
      find_messages();
      change(messages_[below(messages_.size())]);
    }
  }

 private:
  void find_messages() {
    messages_.clear();
    collect(&model_, messages_);
  }

  uint64_t below(uint64_t n) { return random_() % n; }

  int64_t integer(int64_t old) {
    static const int64_t kInteresting[] = {0,
                                           1,
                                           -1,
                                           2,
                                           3,
                                           4,
                                           7,
                                           8,
                                           16,
                                           127,
                                           128,
                                           255,
                                           1 << 16,
                                           INT32_MAX,
                                           INT32_MIN,
                                           INT64_MAX,
                                           INT64_MIN};
    switch (below(3)) {
      case 0:
        return static_cast<int64_t>(static_cast<uint64_t>(old) + below(5) - 2);
      case 1:
        return kInteresting[below(std::size(kInteresting))];
      default:
        return static_cast<int64_t>(below(32));
    }
  }

  // A string of the same kind from elsewhere in the model (a name that exists), or bytes changed.
  std::string text(const Message& like, const FieldDescriptor* field, std::string old) {
    if (below(4) != 0) {
      for (int attempt = 0; attempt < 8; ++attempt) {
        const Message* other = messages_[below(messages_.size())];
        if (other->GetDescriptor() != like.GetDescriptor()) {
          continue;
        }
        const Reflection& reflection = *other->GetReflection();
        if (!field->is_repeated()) {
          return reflection.GetString(*other, field);
        }
        if (const int n = reflection.FieldSize(*other, field); n > 0) {
          return reflection.GetRepeatedString(
              *other, field, static_cast<int>(below(static_cast<uint64_t>(n))));
        }
      }
    }
    const size_t size = old.size();
    old.resize(size + 8);
    old.resize(LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(old.data()), size, old.size()));
    return old;
  }

  void change(Message* message) {
    find_messages();  // choosing another member of a union frees the old one
    const google::protobuf::Descriptor& descriptor = *message->GetDescriptor();
    if (descriptor.field_count() == 0) {
      return;
    }
    const FieldDescriptor* field =
        descriptor.field(static_cast<int>(below(static_cast<uint64_t>(descriptor.field_count()))));
    const Reflection& reflection = *message->GetReflection();
    if (!field->is_repeated()) {
      change_single(message, field, reflection);
      return;
    }
    const int size = reflection.FieldSize(*message, field);
    if (size == 0 || below(3) == 0) {
      add_element(message, field, reflection, size);
    } else if (below(2) == 0) {
      reflection.SwapElements(message,
                              field,
                              static_cast<int>(below(static_cast<uint64_t>(size))),
                              static_cast<int>(below(static_cast<uint64_t>(size))));
      if (below(2) == 0) {
        reflection.RemoveLast(message, field);
      }
    } else {
      change_element(
          message, field, reflection, static_cast<int>(below(static_cast<uint64_t>(size))));
    }
  }

  void change_single(Message* message, const FieldDescriptor* field, const Reflection& reflection) {
    if (reflection.HasField(*message, field) && below(4) == 0) {
      reflection.ClearField(message, field);
      return;
    }
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        reflection.SetInt32(
            message, field, static_cast<int32_t>(integer(reflection.GetInt32(*message, field))));
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        reflection.SetInt64(message, field, integer(reflection.GetInt64(*message, field)));
        break;
      case FieldDescriptor::CPPTYPE_FLOAT:
        reflection.SetFloat(message, field, static_cast<float>(integer(0)));
        break;
      case FieldDescriptor::CPPTYPE_ENUM:
        reflection.SetEnumValue(message, field, static_cast<int>(below(24)));
        break;
      case FieldDescriptor::CPPTYPE_STRING:
        reflection.SetString(
            message, field, text(*message, field, reflection.GetString(*message, field)));
        break;
      case FieldDescriptor::CPPTYPE_MESSAGE:
        change(reflection.MutableMessage(message, field));
        break;
      default:
        break;
    }
  }

  void add_element(Message* message,
                   const FieldDescriptor* field,
                   const Reflection& reflection,
                   int size) {
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        reflection.AddInt32(message, field, static_cast<int32_t>(integer(1)));
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        reflection.AddInt64(message, field, integer(1));
        break;
      case FieldDescriptor::CPPTYPE_FLOAT:
        reflection.AddFloat(message, field, static_cast<float>(integer(1)));
        break;
      case FieldDescriptor::CPPTYPE_STRING:
        reflection.AddString(message, field, text(*message, field, ""));
        break;
      case FieldDescriptor::CPPTYPE_MESSAGE: {
        Message* added = reflection.AddMessage(message, field);
        if (size > 0) {
          added->CopyFrom(reflection.GetRepeatedMessage(
              *message, field, static_cast<int>(below(static_cast<uint64_t>(size)))));
        }
        change(added);
        break;
      }
      default:
        break;
    }
  }

  void change_element(Message* message,
                      const FieldDescriptor* field,
                      const Reflection& reflection,
                      int i) {
    switch (field->cpp_type()) {
      case FieldDescriptor::CPPTYPE_INT32:
        reflection.SetRepeatedInt32(
            message,
            field,
            i,
            static_cast<int32_t>(integer(reflection.GetRepeatedInt32(*message, field, i))));
        break;
      case FieldDescriptor::CPPTYPE_INT64:
        reflection.SetRepeatedInt64(
            message, field, i, integer(reflection.GetRepeatedInt64(*message, field, i)));
        break;
      case FieldDescriptor::CPPTYPE_STRING:
        reflection.SetRepeatedString(
            message,
            field,
            i,
            text(*message, field, reflection.GetRepeatedString(*message, field, i)));
        break;
      case FieldDescriptor::CPPTYPE_MESSAGE:
        change(reflection.MutableRepeatedMessage(message, field, i));
        break;
      default:
        break;
    }
  }

  onnx::ModelProto& model_;
  std::minstd_rand random_;
  std::vector<Message*> messages_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  trainrt::set_log_level(trainrt::LogLevel::kSilent);
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  allow_refusal([&] { import_model(bytes); });
  return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data,
                                          size_t size,
                                          size_t max_size,
                                          unsigned seed) {
  onnx::ModelProto model;
  if (seed % 2 == 0 || !model.ParseFromArray(data, static_cast<int>(size))) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  Mutator(model, seed).mutate();
  const std::string bytes = model.SerializeAsString();
  if (bytes.size() > max_size) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  std::copy(bytes.begin(), bytes.end(), data);
  return bytes.size();
}
