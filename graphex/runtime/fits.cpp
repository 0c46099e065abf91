// Whether a call is a replay of a captured graph: everything that has to be as it was, asked in one go.
//
// torch hands out the address of a function that reads where a tensor begins (its own generated code uses it too).

#include <Python.h>

#include <cstdint>
#include <exception>

static void* (*begin_of)(PyObject*) = nullptr;

// use(function): the address of that function, an int.
static PyObject* use(PyObject*, PyObject* function) {
    void* const begin = PyLong_AsVoidPtr(function);
    if (PyErr_Occurred()) return nullptr;
    begin_of = reinterpret_cast<void* (*)(PyObject*)>(begin);
    Py_RETURN_NONE;
}

// Some of the arguments, by their index, and a number for each.
struct Places {
    const int32_t* indices;
    const int64_t* numbers;
    Py_ssize_t count;

    Places(PyObject* bytes, const char* numbers)
        : indices(reinterpret_cast<const int32_t*>(PyBytes_AS_STRING(bytes))),
          numbers(reinterpret_cast<const int64_t*>(numbers)),
          count(PyBytes_GET_SIZE(bytes) / static_cast<Py_ssize_t>(sizeof(int32_t))) {}
};

// Whether these arguments are the very objects. None is looked into.
static bool are_same(PyObject** args, Py_ssize_t there, const Places& objects) {
    for (Py_ssize_t i = 0; i < objects.count; i++) {
        const int32_t index = objects.indices[i];
        if (index >= there || reinterpret_cast<int64_t>(args[index]) != objects.numbers[i]) return false;
    }
    return true;
}

// Whether these arguments are tensors that begin at these addresses.
static bool begin_at(PyObject** args, Py_ssize_t there, const Places& addresses) {
    try {
        for (Py_ssize_t i = 0; i < addresses.count; i++) {
            const int32_t index = addresses.indices[i];
            if (index >= there) return false;
            if (reinterpret_cast<int64_t>(begin_of(args[index])) != addresses.numbers[i]) return false;
        }
    } catch (const std::exception&) {  // no tensor, or one without memory
        return false;
    }
    return true;
}

// Whether every question is answered as before: 1 or 0, or -1 with an exception set.
static int are_answered(PyObject* questions, PyObject* answers) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(questions); i++) {
        PyObject* before = PyTuple_GET_ITEM(answers, i);
        PyObject* now = PyObject_CallNoArgs(PyTuple_GET_ITEM(questions, i));
        const int equal = now == nullptr ? -1 : now == before ? 1 : PyObject_RichCompareBool(now, before, Py_EQ);
        Py_XDECREF(now);
        if (equal != 1) return equal;
    }
    return 1;
}

static bool are_right(PyObject* const* given, Py_ssize_t count) {
    return count == 7 && begin_of != nullptr && PyTuple_CheckExact(given[0]) && PyTuple_CheckExact(given[1]) &&
           PyTuple_GET_SIZE(given[0]) == PyTuple_GET_SIZE(given[1]) && PyBytes_CheckExact(given[2]) &&
           PyBytes_CheckExact(given[3]) && PyBytes_GET_SIZE(given[3]) == 2 * PyBytes_GET_SIZE(given[2]) &&
           PyBytes_CheckExact(given[4]) && PyByteArray_CheckExact(given[5]) &&
           PyByteArray_GET_SIZE(given[5]) == 2 * PyBytes_GET_SIZE(given[4]) &&
           (PyTuple_CheckExact(given[6]) || PyList_CheckExact(given[6]));
}

// fits(questions, answers, indices, addresses, frozen, identities, args): two tuples of one length; the bytes of an int32
// and an int64 array of one length; the same twice, the latter a bytearray; a list or tuple.
//
// True if `frozen` are the same objects, `indices` are tensors at their addresses, and the answers are what they were.
// A question that raises means that the call does not fit: the search that follows asks it again, and raises. Questions
// come last, for they may run any code, and nothing is read from the other arguments after that.
static PyObject* fits(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (!are_right(given, count)) {
        PyErr_SetString(PyExc_TypeError,
                        "fits(questions, answers, indices, addresses, frozen, identities, args)");
        return nullptr;
    }
    PyObject** args = PySequence_Fast_ITEMS(given[6]);
    const Py_ssize_t there = PySequence_Fast_GET_SIZE(given[6]);
    if (!are_same(args, there, Places(given[4], PyByteArray_AS_STRING(given[5])))) Py_RETURN_FALSE;
    if (!begin_at(args, there, Places(given[2], PyBytes_AS_STRING(given[3])))) Py_RETURN_FALSE;
    const int answered = are_answered(given[0], given[1]);
    if (answered < 0) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;  // such as KeyboardInterrupt
        PyErr_Clear();
    }
    return PyBool_FromLong(answered == 1);
}

static PyMethodDef methods[] = {
    {"use", use, METH_O, nullptr},
    {"fits", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fits)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, "fits", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_fits() { return PyModule_Create(&module); }
